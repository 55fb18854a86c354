"""What samples completions: the protocol, and what every engine shares."""
