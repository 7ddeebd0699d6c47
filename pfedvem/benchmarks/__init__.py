"""What a round costs, measured side by side with the plain way."""
