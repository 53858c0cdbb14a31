"""Memory: estimates of what a train step takes of a device, before the step runs."""
