"""What a training loop iterates: batches, resident sets, and the attachment to a feeder."""
