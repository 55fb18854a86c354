"""What each side says of the same tokens, as it is and under another condition."""
