"""Lightning callbacks: hooks over the pure classes of app/."""
