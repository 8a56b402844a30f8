"""How the models of this project are made: the bundled storyteller, and synthetic models."""
