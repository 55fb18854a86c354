"""Models and data that come with Lockstep, so that it can be tried without a download."""
