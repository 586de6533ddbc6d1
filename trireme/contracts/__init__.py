"""What travels between the services: generated messages in `v1`, and the small conversions around them. No torch."""
