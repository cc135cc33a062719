"""Interfaces that are translated to chats and back: OpenAI's Responses and Anthropic's Messages."""
