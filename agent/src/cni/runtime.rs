//! Asks the container runtime what it has really loaded.
