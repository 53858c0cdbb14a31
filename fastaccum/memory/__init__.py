"""What a train step takes of a device's memory, and what the device has: before it runs."""
