"""`kvoy bench soak`: a router under load for long. Nothing may be lost, and nothing may grow."""
