"""Requests and answers of OpenAI's and Anthropic's APIs: checks, translation, encoding. No I/O."""
