"""The vision tower, the projector, and images on their way into the text."""
