"""What a prepared sample is made of: fields, structure, memory layout, status."""
