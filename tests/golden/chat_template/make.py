"""Writes cases.json and, given a folder with Qwen3's tokenizer_config.json, qwen3.json.

    python make.py [folder of the published Qwen3 tokenizer]

Needs transformers and jinja2 (made with 5.17.0 and 3.1.6). Everything is rendered by Transformers'
own `render_jinja_template`; `null` stands for a template that is an error there.
"""
import json
import os
import sys

from transformers.utils.chat_template_utils import render_jinja_template

HERE = os.path.dirname(os.path.abspath(__file__))
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <there> & \"you\" 'x' é 🎉"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"function": {"name": "f", "arguments": {"b": 1, "a": [1.5, True, None, "ü\n\t\u0007"]}}}]},
    {"role": "tool", "content": "  padded\n\nlines \n"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "does f", "parameters": {
    "type": "object", "properties": {"x": {"type": "number", "enum": [1, 1e22, 1e-7, 0.1, -0.0]}},
    "required": []}}}]

TEMPLATES = {
    "plain": "{{ messages[0].content }}",
    "bos and eos": "{{ bos_token }}{{ eos_token }}{{ pad_token }}|",
    "trailing newline": "a\n",
    "two trailing newlines": "a\n\n",
    "trim and lstrip": "x\n    {% if true %}\n  y\n    {% endif %}\nz",
    "no lstrip inside a line": "a  {% if true %}b{% endif %}  c",
    "minus": "a \n {%- if true -%} \n b \n {%- endif -%} \n c",
    "plus": "a\n   {%+ if true %}b{% endif +%}\nc",
    "comment": "a {# comment {{ x }} #} b\n{# line #}\nc",
    "raw": "{% raw %}{{ x }}{% endraw %}",
    "loop variables": "{% for m in messages %}{{ loop.index0 }}{{ loop.index }}{{ loop.first }}"
                      "{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }};{% endfor %}",
    "previtem and nextitem": "{% for m in messages %}{% if loop.previtem is defined %}"
                             "{{ loop.previtem.role }}{% endif %}>{% if loop.nextitem is defined %}"
                             "{{ loop.nextitem.role }}{% endif %};{% endfor %}",
    "loop else": "{% for m in [] %}a{% else %}b{% endfor %}",
    "loop filter": "{% for m in messages if m.role != 'system' %}{{ m.role }}{{ loop.index }};{% endfor %}",
    "break and continue": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
                          "{{ m.role }}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "recursive loop": "{% for x in [[1, [2, [3]]]] recursive %}{% if x is iterable %}({{ loop(x) }})"
                      "{% else %}{{ x }}{% endif %}{% endfor %}",
    "loop cycle": "{% for m in messages %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "loop changed": "{% for x in [1, 1, 2] %}{% if loop.changed(x) %}{{ x }}{% endif %}{% endfor %}",
    "unpacking": "{% for k, v in {'a': 1, 'b': [2]}.items() %}{{ k }}={{ v }};{% endfor %}",
    "set unpacking": "{% set a, b = [1, 'x'] %}{{ a }}{{ b }}",
    "namespace": "{% set ns = namespace(n=0, s='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
                 "{% set ns.s = ns.s ~ m.role[0] %}{% endfor %}{{ ns.n }}{{ ns.s }}{{ ns.missing is defined }}",
    "scope of set": "{% set x = 1 %}{% for m in messages %}{% set x = 2 %}{% endfor %}{{ x }}",
    "set block": "{% set x %}a{{ 1 + 1 }}b{% endset %}[{{ x }}]{{ x is string }}",
    "filter block": "{% filter upper %}abc {{ 'é' }}{% endfilter %}",
    "macro": "{% macro f(a, b='x', c=none) %}<{{ a }}{{ b }}{{ c }}>{% endmacro %}{{ f(1) }}{{ f(1, c=2) }}"
             "{{ f('a', 'b') | upper }}",
    "macro recursion": "{% macro f(n) %}{% if n > 0 %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "call block": "{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}in{% endcall %}",
    "with": "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}",
    "generation": "a{% generation %}b{% endgeneration %}c\n{%- generation -%}\n d \n{%- endgeneration %}\ne",
    "undefined prints nothing": "[{{ nothing }}]",
    "undefined attribute": "[{{ messages[0].nothing }}][{{ messages[0]['nothing'] }}]",
    "attribute of undefined": "{{ nothing.more }}",
    "item of undefined": "{{ nothing['more'] }}",
    "iterate undefined": "{% for x in nothing %}{% endfor %}ok",
    "undefined plus": "{{ nothing + 'x' }}",
    "undefined concat": "{{ nothing ~ 'x' }}",
    "undefined tests": "{{ nothing is defined }}{{ nothing is undefined }}{{ nothing is none }}{{ not nothing }}",
    "default": "{{ nothing | default('d') }}{{ '' | default('e', true) }}{{ none | d('f') }}{{ none | d('g', boolean=true) }}",
    "printing": "{{ true }}{{ false }}{{ none }}{{ 1.0 }}{{ 10 / 2 }}{{ 7 // 2 }}{{ -7 // 2 }}{{ -7 % 3 }}{{ 2 ** 10 }}",
    "printing floats": "{{ 1e16 }} {{ 1e15 }} {{ 123456789.125 }} {{ 1e-5 }} {{ 0.0001 }} {{ 1e100 }} {{ 1/3 }}",
    "printing lists": "{{ [1, 'a', \"it's\", 'say \"hi\"', none, true, 1.5, {'k': ['v']}, (1,), (1, 2)] }}",
    "printing strings in lists": "{{ ['a\\nb\\tc', 'é🎉', '\\\\'] }}",
    "arithmetic with booleans": "{{ true + 1 }}{{ 3 * true }}",
    "list plus": "{{ [1] + [2, 3] }}{{ (1,) + (2,) }}",
    "repeat": "{{ '-' * 5 }}{{ 2 * 'ab' }}{{ [1] * 3 }}{{ 'x' * 0 }}{{ 'x' * -1 }}",
    "comparison chain": "{{ 1 < 2 < 3 }}{{ 1 < 2 > 3 }}{{ 'a' < 'b' }}{{ 1 == 1.0 }}{{ [1] == [1] }}",
    "in": "{{ 'a' in 'abc' }}{{ 1 in [1, 2] }}{{ 'k' in {'k': 1} }}{{ 'z' not in 'abc' }}",
    "logic": "{{ 1 and 0 }}{{ 0 or 'x' }}{{ not 1 }}{{ none or 'y' }}{{ '' and 1 }}",
    "inline if": "{{ 'a' if true }}{{ 'b' if false }}{{ 'c' if false else 'd' }}",
    "indexing": "{{ [1, 2, 3][-1] }}{{ 'abc'[0] }}{{ 'abc'[-1] }}{{ [1][5] }}{{ {'a': 1}['a'] }}{{ (1, 2)[1] }}",
    "slices": "{{ [1, 2, 3, 4][1:] }}{{ [1, 2, 3, 4][::-1] }}{{ [1, 2, 3, 4][:-1] }}{{ 'abcdef'[::2] }}"
              "{{ 'abcdef'[::-1] }}{{ 'abcdef'[4:1:-1] }}{{ 'abcdef'[1:4] }}{{ 'abc'[5:] }}{{ [1, 2, 3][-2:] }}"
              "{{ 'abc'[:0:-1] }}{{ [1, 2, 3][10::-1] }}{{ [][::-1] }}{{ 'añ🎉b'[1:3] }}",
    "reversed loop": "{% for m in messages[::-1] %}{{ m.role }}{{ loop.index0 }};{% endfor %}",
    "nested slices": "{{ messages[1:][::-1][0].role }}{{ messages[:2] | length }}",
    "range": "{{ range(3) | list }}{{ range(1, 10, 3) | list }}{{ range(5, 0, -2) | list }}{{ range(0) | list }}",
    "tests": "{{ 'a' is string }}{{ 1 is number }}{{ 1 is integer }}{{ 1.0 is float }}{{ {} is mapping }}"
             "{{ [] is sequence }}{{ 'a' is sequence }}{{ {} is sequence }}{{ [] is iterable }}{{ 'a' is iterable }}"
             "{{ none is none }}{{ true is boolean }}{{ true is true }}{{ 1 is odd }}{{ 4 is divisibleby(2) }}"
             "{{ 1 is eq(1) }}{{ 1 is equalto 1 }}{{ 2 is in [1, 2] }}{{ 'a' is lower }}{{ 'A' is upper }}{{ [] is mapping }}"
             "{{ 1 is not string }}{{ false is false }}{{ 5 is gt 3 }}{{ messages[2].content is none }}",
    "string methods": "{{ ' a '.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'xxa'.lstrip('x') }}|{{ 'axx'.rstrip('x') }}|"
                      "{{ 'a,b,c'.split(',') }}|{{ 'a b  c'.split() }}|{{ 'a,b,c'.split(',', 1) }}|{{ 'a,b,c'.rsplit(',', 1) }}|"
                      "{{ 'abc'.startswith('a') }}{{ 'abc'.endswith(('x', 'c')) }}|{{ 'Abc'.upper() }}{{ 'Abc'.lower() }}|"
                      "{{ 'hello world'.title() }}{{ 'hello World'.capitalize() }}|{{ 'aXbXc'.replace('X', '-') }}"
                      "{{ 'aXbXc'.replace('X', '-', 1) }}|{{ 'abcabc'.find('c') }}{{ 'abc'.find('z') }}{{ 'abcabc'.rfind('c') }}|"
                      "{{ 'aaa'.count('a') }}|{{ '-'.join(['a', 'b']) }}|{{ '12'.isdigit() }}{{ 'a1'.isalnum() }}{{ 'a'.isalpha() }}|"
                      "{{ 'a\\nb\\n'.splitlines() }}",
    "more string methods": "{{ 'a b  c'.rsplit(None) }}|{{ 'prefix-x'.removeprefix('prefix-') }}{{ 'x.py'.removesuffix('.py') }}|"
                           "{{ 'a=b=c'.partition('=') }}{{ 'a=b=c'.rpartition('=') }}{{ 'abc'.partition('=') }}|"
                           "{{ 'ab'.ljust(4) }}|{{ 'ab'.rjust(4, '.') }}|{{ 'ab'.center(5, '*') }}|{{ 'abc'.center(6, '*') }}|"
                           "{{ '-5'.zfill(4) }}|{{ 'a b c'.split(None, 1) }}|{{ ' a  b '.rsplit(None, 1) }}|{{ 'a b'.split(' ') }}|"
                           "{{ 'a, b'.split(', ')[-1] }}|{{ 'a,b,c'.split(sep=',', maxsplit=1) }}",
    "format method": "{{ '{}-{}'.format(1, 'a') }}{{ '{0}{1}{0}'.format('x', 'y') }}{{ '{:>5}|{:<4}|'.format('a', 'b') }}{{ '{:.2f}'.format(3.14159) }}",
    "dict methods": "{{ {'a': 1}.get('a') }}{{ {'a': 1}.get('b') }}{{ {'a': 1}.get('b', 2) }}"
                    "{% for k in {'x': 1, 'y': 2}.keys() %}{{ k }}{% endfor %}{% for v in {'x': 1, 'y': 2}.values() %}{{ v }}{% endfor %}",
    "list methods": "{{ [1, 2, 1].count(1) }}{{ [1, 2, 1].index(2) }}",
    "filters on strings": "{{ 'abc' | upper }}{{ 'ABC' | lower }}{{ 'hello world' | title }}{{ 'heLLo' | capitalize }}"
                          "[{{ ' a ' | trim }}][{{ 'xax' | trim('x') }}]{{ 'abc' | length }}{{ 'abc' | reverse }}"
                          "{{ 'aXb' | replace('X', 'Y') }}{{ 'abc' | first }}{{ 'abc' | last }}{{ 'abc' | list }}",
    "filters on lists": "{{ [3, 1, 2] | sort }}{{ [3, 1, 2] | sort(reverse=true) }}{{ [1, 1, 2] | unique | list }}"
                        "{{ [1, 2] | sum }}{{ [1, 2] | join('-') }}{{ [1, 2] | join }}{{ [1, 2] | first }}{{ [1, 2] | last }}{{ [2, 1] | min }}"
                        "{{ [2, 1] | max }}{{ [1, 2, 3] | reverse | list }}{{ [1, 2, 3] | length }}{{ [1, 2, 3] | count }}",
    "filters with attributes": "{{ messages | map(attribute='role') | list }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
                               "{{ messages | rejectattr('role', 'in', ['user', 'system']) | map(attribute='role') | join(',') }}"
                               "{{ [1, 2, 3, 4] | select('odd') | list }}{{ [1, 2, 3] | reject('odd') | list }}{{ ['a', 'b'] | map('upper') | list }}"
                               "{{ messages | selectattr('tool_calls', 'defined') | list | length }}{{ messages | map(attribute='role') | unique | join }}"
                               "{{ [{'a': 2}, {'a': 3}] | sum(attribute='a') }}",
    "numbers": "{{ '42' | int }}{{ '4.5' | float }}{{ 'x' | int }}{{ 'x' | int(7) }}{{ -3 | abs }}{{ 3.14159 | round(2) }}{{ 2.5 | round }}{{ 7.9 | int }}",
    "string filter": "{{ 1 | string }}{{ none | string }}{{ [1, 'a'] | string }}{{ true | string ~ 'x' }}",
    "indent": "{{ 'a\\nb\\n\\nc' | indent }}|{{ 'a\\nb' | indent(2, true) }}|{{ 'a\\n\\nb' | indent(1, blank=true) }}|{{ 'a\\nb' | indent('> ') }}",
    "batch and slice": "{{ [1, 2, 3, 4, 5] | batch(2) | list }}{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 2, 3, 4, 5] | slice(2) | list }}",
    "dictsort and items": "{{ {'b': 1, 'a': 2} | dictsort }}{{ {'b': 1, 'a': 2} | items | list }}",
    "groupby": "{% for role, group in messages | groupby('role') %}{{ role }}:{{ group | length }};{% endfor %}",
    "escape": "{{ messages[1].content | escape }}{{ '<' | e }}{{ '<b>' | safe }}",
    "tojson": "{{ messages | tojson }}",
    "tojson tools": "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}",
    "tojson indent": "{{ tools | tojson(indent=2) }}|{{ {} | tojson(indent=4) }}|{{ [] | tojson(indent=4) }}|{{ [1, {'a': []}] | tojson(indent=1) }}",
    "tojson options": "{{ {'b': 'é', 'a': [1, 2]} | tojson(ensure_ascii=true) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}"
                      "{{ {'b': 1, 'a': [1, 2]} | tojson(separators=(',', ':')) }}{{ [1, 2] | tojson(indent='--') }}",
    "tojson scalars": "{{ 'x' | tojson }}{{ 1 | tojson }}{{ 1.0 | tojson }}{{ none | tojson }}{{ true | tojson }}{{ '</script>&\\'' | tojson }}{{ 1e22 | tojson }}{{ 1e-7 | tojson }}",
    "tojson undefined": "{{ nothing | tojson }}",
    "raise": "{{ raise_exception('no') }}",
    "conditional raise": "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}ok",
    "tools are none": "{{ tools is none }}{{ tools is defined }}{{ documents is none }}",
    "generation prompt": "{% if add_generation_prompt %}yes{% else %}no{% endif %}",
    "variables": "{{ enable_thinking }}{{ custom.deep[0] }}{{ enable_thinking is defined and enable_thinking is false }}",
    "dict function": "{{ dict(a=1, b='x') }}{{ dict({'k': 1}) }}",
    "do": "{% set ns = namespace(x=1) %}{% set ns.y = 2 %}{{ ns.x + ns.y }}",
    "string escapes": "{{ 'a\\nb\\tc\\'d\\\"e\\\\f' }}{{ \"\\u00e9\" }}{{ '\\x41' }}",
    "integer forms": "{{ 0x10 }}{{ 0b11 }}{{ 1_000 }}{{ 0o17 }}",
    "concat of numbers": "{{ 1 ~ 2.0 ~ none ~ true ~ [1] }}",
    "string times and plus": "{{ '\\n' * 2 + 'x' }}",
    "string plus int": "{{ 'a' + 1 }}",
    "list append is refused": "{% set l = [] %}{{ l.append(1) }}",
    "private attributes": "{{ ''.__class__ }}",
    "block": "{% block a %}x{{ 1 }}{% endblock %}",
    "unicode": "{{ '日本' ~ '🎉' }}日本語{{ '日本語' | length }}{{ '日本語'[1] }}",
    "elif": "{% if false %}a{% elif true %}b{% else %}c{% endif %}",
    "nested quotes": "{{ \"'\" ~ '\"' }}",
    "zero is falsy": "{% if 0 %}a{% endif %}{% if [] %}b{% endif %}{% if {} %}c{% endif %}{% if '' %}d{% endif %}{% if 0.0 %}e{% endif %}f",
    "content parts": "{% for part in [{'type': 'text', 'text': 'a'}, {'type': 'image'}] %}"
                     "{% if part.type == 'text' %}{{ part.text }}{% elif 'image' in part or part.type == 'image' %}<image>{% endif %}{% endfor %}",
    "keys that are methods": "{{ {'items': 5}['items'] }}{{ {'x': {'items': [1]}}.x['items'] }}",
    "unknown filter": "{{ 1 | nosuchfilter }}",
    "unknown function": "{{ nosuchfunction() }}",
    "syntax error": "{% if %}",
}


def render(template, messages, tools, variables, add_generation_prompt):
    try:
        rendered, _ = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=template,
            add_generation_prompt=add_generation_prompt, bos_token="<s>", eos_token="</s>", **variables)
        return rendered[0]
    except Exception as error:  # noqa: BLE001 - any error is one for us as well
        print(f"  error: {type(error).__name__}: {str(error)[:90]}", file=sys.stderr)
        return None


def write(name, cases):
    with open(os.path.join(HERE, name), "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases) + "\n]\n")


cases = []
for name, template in TEMPLATES.items():
    print(name, file=sys.stderr)
    variables = {"enable_thinking": False, "custom": {"deep": ["d"]}} if name == "variables" else {}
    tools = TOOLS if "tools" in name and name != "tools are none" or name == "tojson indent" else None
    case = {"name": name, "template": template, "messages": MESSAGES, "tools": tools,
            "variables": variables, "add_generation_prompt": name == "generation prompt"}
    case["rendered"] = render(template, MESSAGES, tools, variables, case["add_generation_prompt"])
    cases.append(case)
write("cases.json", cases)

if len(sys.argv) > 1:
    config = json.load(open(os.path.join(sys.argv[1], "tokenizer_config.json"), encoding="utf-8"))
    conversations = [
        [{"role": "user", "content": "Hi"}],
        MESSAGES[:2],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
         {"role": "user", "content": "c"}],
        [{"role": "user", "content": "weather?"},
         {"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": [
             {"type": "function", "function": {"name": "f", "arguments": {"x": 1.5, "city": "Zürich"}}},
             {"type": "function", "function": {"name": "f", "arguments": "{\"x\": 2}"}}]},
         {"role": "tool", "content": "12°"}, {"role": "tool", "content": "13°"},
         {"role": "assistant", "content": "It is 12°."}, {"role": "user", "content": "thanks"}],
    ]
    cases = []
    for messages in conversations:
        for tools in (None, TOOLS):
            for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
                for prompt in (False, True):
                    cases.append({"messages": messages, "tools": tools, "variables": variables,
                                  "add_generation_prompt": prompt,
                                  "rendered": render(config["chat_template"], messages, tools, variables, prompt)})
    write("qwen3.json", cases)
