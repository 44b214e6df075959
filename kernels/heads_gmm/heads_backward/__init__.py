"""The backward of heads that share their input."""
