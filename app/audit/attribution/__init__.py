"""From differences between the sides to noise, factors and causes."""
