"""From differences to noise, factors and causes."""
