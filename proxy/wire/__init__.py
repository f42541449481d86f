"""Pure: OpenAI's JSON to our values and back."""
