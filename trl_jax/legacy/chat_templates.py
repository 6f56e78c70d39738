"""Chat templates that earlier releases of TRL had in `trainer.utils`."""

__all__ = ["SIMPLE_CHAT_TEMPLATE", "SIMPLE_QUERY_CHAT_TEMPLATE", "SIMPLE_SFT_CHAT_TEMPLATE"]

# "User: ..." and "Assistant: ...", with an empty line after each message.
SIMPLE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# The contents alone, with a space before each.
SIMPLE_QUERY_CHAT_TEMPLATE = "{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}"
SIMPLE_SFT_CHAT_TEMPLATE = SIMPLE_QUERY_CHAT_TEMPLATE + "{{ eos_token }}"
