"""What is measured: each module registers its scene under its own name."""
