"""Writes families.json: templates in the manner of Llama, Mistral and Qwen2.5, and their renderings.

    python make_families.py

Needs transformers and jinja2 (made with 5.23.0 and 3.1.6). The templates use what the published ones
use, with words of their own. Everything is rendered by Transformers' own `render_jinja_template`, at
a fixed time; a template that is an error there has no `rendered`, and an `error` if it raised it.
"""
import json
import os
import sys
from datetime import datetime, timezone

from jinja2.exceptions import TemplateError
from transformers.utils import chat_template_utils

HERE = os.path.dirname(os.path.abspath(__file__))
# 2024-11-23 12:34:56 UTC, a Saturday.
NOW = 1732365296


class Clock(datetime):
    """`datetime` whose `now()` is always the same."""

    @classmethod
    def now(cls, tz=None):
        return datetime.fromtimestamp(NOW, timezone.utc).replace(tzinfo=tz)


chat_template_utils.datetime = Clock

TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather of a city. Says \"sunny\" & <more>.",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "A city, such as Zürich", "enum": ["Zürich", "東京"]},
            "days": {"type": "integer", "default": 1}}, "required": ["city"]},
        "return": {"type": "string", "description": "words"}}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}},
]


def call(name, arguments, id="abcdefghi"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "  Be brief.\n"}, {"role": "user", "content": " Hi <there> & \"you\" é 🎉\n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"}, {"role": "assistant", "content": " Two "},
     {"role": "user", "content": "Three"}],
    [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}, {"role": "user", "content": "Three"},
     {"role": "assistant", "content": "Four"}],
    # A call of a tool, and its answer.
    [{"role": "user", "content": "Weather?"},
     {"role": "assistant", "content": None, "tool_calls": [call("get_weather", {"city": "Zürich", "days": 2})]},
     {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "  12° & rain\n"},
     {"role": "assistant", "content": "It rains."}, {"role": "user", "content": "Thanks"}],
    # Answers that are no strings, and parts of content.
    [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
     {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]},
     {"role": "assistant", "content": "", "tool_calls": [call("now", {})]},
     {"role": "tool", "tool_call_id": "abcdefghi", "content": {"degrees": [12, 1.5, None, True]}}],
    # Two calls at once, and arguments as a string.
    [{"role": "user", "content": "Both"},
     {"role": "assistant", "content": "Wait.", "tool_calls": [
         call("get_weather", {"city": "東京"}, "aaaaaaaa1"), call("now", "{}", "aaaaaaaa2")]},
     {"role": "tool", "content": "1", "tool_call_id": "aaaaaaaa1"}, {"role": "tool", "content": "2", "tool_call_id": "aaaaaaaa2"}],
    # A tool that the model brings along.
    [{"role": "user", "content": "Search"},
     {"role": "assistant", "tool_calls": [call("brave_search", {"query": "xserv"})]},
     {"role": "ipython", "content": "found"}],
    # Roles out of order, and unknown ones.
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [{"role": "assistant", "content": "first"}, {"role": "user", "content": "b"}],
    [{"role": "user", "content": "a"}, {"role": "critic", "content": "b"}],
    [{"role": "system", "content": "Alone."}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call("now", {}, "short")]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": []}, {"role": "user", "content": "c"}],
    [{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, {"role": "user", "content": "C"}],
]

TEMPLATES = {
    "llama 2": ("<s>", "</s>", """\
{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}\
{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Turns go user, assistant, user, ...') }}{% endif %}\
{% if loop.index0 == 0 and system != false %}\
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""),
    "llama 3": ("<|begin_of_text|>", "<|eot_id|>", """\
{% set turns = messages %}{% for turn in turns %}\
{% set text = '<|start_header_id|>' + turn['role'] + '<|end_header_id|>\n\n'+ turn['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""),
    "llama 3.1": ("<|begin_of_text|>", "<|eot_id|>", """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "01 Feb 2023" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The system's words are taken out, so that they can go into their place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}

{#- Its header. #}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\\n\\n"}}
{%- endif %}
{{- "Known until: January 2023\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "These functions can be called: " }}
    {{- 'write {"name": its name, "parameters": a dictionary}.' }}
    {{- "\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system }}
{{- "<|eot_id|>" }}

{#- Or they go to the user's first words. #}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("There are no first words of a user for the tools!") }}
{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- "These functions " }}
    {{- "can be called.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first + "<|eot_id|>"}}
{%- endif %}

{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
            {{- "<|python_tag|>" + tool_call.name + ".call(" }}
            {%- for arg_name, arg_val in tool_call.arguments | items %}
                {{- arg_name + '="' + arg_val + '"' }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- endif %}
                {%- endfor %}
            {{- ")" }}
        {%- else  %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
            {{- '{"name": "' + tool_call.name + '", ' }}
            {{- '"parameters": ' }}
            {{- tool_call.arguments | tojson }}
            {{- "}" }}
        {%- endif %}
        {%- if builtin_tools is defined %}
            {#- More is to come #}
            {{- "<|eom_id|>" }}
        {%- else %}
            {{- "<|eot_id|>" }}
        {%- endif %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""),
    "llama 3.2": ("<|begin_of_text|>", "<|eot_id|>", """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "01 Feb 2023" %}
    {%- endif %}
{%- endif %}
{%- set parts = namespace(images=false, count=0) %}
{%- for message in messages %}
    {%- if message['content'] is string %}
        {%- set parts.count = parts.count + 1 %}
    {%- else %}
        {%- for content in message['content'] %}
            {%- if content['type'] == 'image' %}
                {%- set parts.images = true %}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}
        {%- set system = messages[0]['content']|trim %}
    {%- else %}
        {%- set system = messages[0]['content'][0]['text']|trim %}
    {%- endif %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "You help." if tools is not none else "" %}
{%- endif %}
{%- if parts.images %}
    {{- raise_exception("No pictures.") }}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + " (" ~ parts.count ~ ")\\n\\n" }}
{{- system }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role in ['tool', 'ipython'] %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is string %}
            {{- { "output": message.content } | tojson }}
        {%- else %}
            {%- for content in message['content']  %}
                {{- content | string | trim }}
            {%- endfor %}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n[' -}}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- call.name + '(' -}}
            {%- if call.arguments is mapping %}
                {%- for name in call.arguments %}
                    {{- name + '=' + call.arguments[name] | tojson -}}
                    {%- if not loop.last %}, {% endif -%}
                {%- endfor %}
            {%- else %}
                {{- call.arguments -}}
            {%- endif %}
            {{- ')' + (', ' if not loop.last else '') -}}
        {%- endfor %}
        {{- ']' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if message['content'] is string %}
            {{- message['content'] | trim }}
        {%- else %}
            {{- message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | map('trim') | join('\\n') }}
        {%- endif %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""),
    "mistral 0.1": ("<s>", "</s>", """\
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Turns go user, assistant, user, ...') }}{% endif %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ message['content'] + eos_token + ' ' }}{% else %}{{ raise_exception('Who is a ' + message['role'] + '?') }}{% endif %}{% endfor %}"""),
    "mistral 0.2": ("<s>", "</s>", """\
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}

{{- bos_token }}
{%- for message in turns %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the system, turns go user, assistant, user, ...") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system is defined %}
            {{- " [INST] " + system + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- " [INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token}}
    {%- else %}
        {{- raise_exception("Only users and assistants, after the system!") }}
    {%- endif %}
{%- endfor %}
"""),
    "mistral 0.3": ("<s>", "</s>", """\
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set users = turns | selectattr("role", "equalto", "user") | list %}

{#- Calls and answers of tools do not count as turns. #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in turns %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the system, turns go user, assistant, user, ...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in turns %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
            {%- endif %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("The id of a call has 9 letters or digits!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("The id of a call has 9 letters or digits!") }}
        {%- endif %}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only users, assistants and tools, after the system!") }}
    {%- endif %}
{%- endfor %}
"""),
    "mistral small": ("<s>", "</s>", """\
{%- set today = strftime_now("%Y-%m-%d") %}
{%- set usual = "You are a model.\\nToday is " + today + ", a " + strftime_now("%A, %-d %B") + ".\\n\\n" %}

{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}
        {%- set system = messages[0]['content'] %}
    {%- else %}
        {%- set system = messages[0]['content'][0]['text'] %}
    {%- endif %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = usual %}
    {%- set turns = messages %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}
            {{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] | sort(attribute='type', reverse=True) %}
                {%- if block['type'] == 'text' %}
                    {{- block['text'] }}
                {%- elif block['type'] in ['image', 'image_url'] %}
                    {{- '[IMG]' }}
                {%- else %}
                    {{- raise_exception('Only text and image blocks!') }}
                {%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] ~ eos_token }}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles!') }}
    {%- endif %}
{%- endfor %}
"""),
    "qwen 2.5": (None, "<|im_end|>", """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\nFunctions to be called, in <tools></tools>:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nCall one so:\\n<tool_call>\\n{\\"name\\": <its name>, \\"arguments\\": <JSON>}\\n</tool_call><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""),
}
# Variables with which a template is rendered, beside none.
VARIABLES = {
    "llama 3.1": [{"date_string": "26 Jul 2024", "tools_in_user_message": False}, {"builtin_tools": ["brave_search", "code_interpreter"]},
                  {"custom_tools": TOOLS[1:]}],
    "llama 3.2": [{"date_string": "26 Jul 2024"}],
}


def render(name, messages, tools, variables, prompt):
    """The text, or None, and the message with which the template gives up."""
    bos, eos, source = TEMPLATES[name]
    tokens = {key: token for key, token in [("bos_token", bos), ("eos_token", eos)] if token}
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            conversations=[messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **tokens, **variables)
        return rendered[0], None
    except TemplateError as error:
        return None, str(error) if type(error) is TemplateError else None
    except Exception as error:  # noqa: BLE001 - any error is one for us as well
        print(f"  {name}: {type(error).__name__}: {str(error)[:90]}", file=sys.stderr)
        return None, None


cases = []
for name in TEMPLATES:
    for number, messages in enumerate(CONVERSATIONS):
        # Tools where the template reads them, and the conversation is more than a mistake.
        for has_tools in (False, True) if "tools" in TEMPLATES[name][2] and number < 8 else (False,):
            for variables in [{}] + VARIABLES.get(name, []):
                # Without an opening for the answer in a few of them.
                for prompt in ((False, True) if number < 3 and not has_tools else (True,)):
                    rendered, error = render(name, messages, TOOLS if has_tools else None, variables, prompt)
                    cases.append({"template": name, "conversation": number, "has_tools": has_tools, "variables": variables,
                                  "add_generation_prompt": prompt, "rendered": rendered, "error": error})
with open(os.path.join(HERE, "families.json"), "w", encoding="utf-8") as file:
    def dumps(value):
        return json.dumps(value, ensure_ascii=False)

    file.write('{"now": %d,\n"tools": %s,\n"conversations": [\n%s],\n"templates": {\n%s},\n"cases": [\n%s]}\n' % (
        NOW, dumps(TOOLS), ",\n".join(map(dumps, CONVERSATIONS)),
        ",\n".join(f"{dumps(name)}: {dumps(dict(bos=bos, eos=eos, source=source))}" for name, (bos, eos, source) in TEMPLATES.items()),
        ",\n".join(map(dumps, cases))))
print(len(cases), "cases,", sum(case["rendered"] is not None for case in cases), "rendered,",
      sum(case["error"] is not None for case in cases), "raised")
