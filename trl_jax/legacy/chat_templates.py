"""Chat templates that scripts imported from TRL's `trainer.utils` in its earlier releases."""

__all__ = ["SIMPLE_CHAT_TEMPLATE", "SIMPLE_QUERY_CHAT_TEMPLATE", "SIMPLE_SFT_CHAT_TEMPLATE"]

# "User: ...", "Assistant: ...", with an empty line behind each message.
SIMPLE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# The messages alone, a space before each.
SIMPLE_QUERY_CHAT_TEMPLATE = "{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}"
SIMPLE_SFT_CHAT_TEMPLATE = SIMPLE_QUERY_CHAT_TEMPLATE + "{{ eos_token }}"
