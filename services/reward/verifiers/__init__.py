"""What judges responses: the port, the built-in verifiers, and how others are found."""
