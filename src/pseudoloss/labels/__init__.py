"""What is known about labels."""
