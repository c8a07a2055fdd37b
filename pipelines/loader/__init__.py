"""What a training loop iterates: batches, resident sets, and the client of a feeder's stream."""
