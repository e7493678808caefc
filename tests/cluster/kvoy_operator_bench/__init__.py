"""What the operator costs with a thousand services, on a real API server: `make bench-operator`."""
