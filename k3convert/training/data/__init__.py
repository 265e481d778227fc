"""What is trained on: documents, how they share rows, and the order in which they come."""
