"""Writes templates.json: what Transformers makes of answers by response templates.

    python make_templates.py

Needs transformers and regex (made with 5.24.0). `message` is the result of Transformers' own `parse_response`;
`null` stands for an error there. `here` says in what the library differs on purpose, and `note` why.
"""
import json
import os

from transformers.utils.chat_parsing import parse_response

HERE = os.path.dirname(os.path.abspath(__file__))
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

TEMPLATES = {
    "tags": {
        "version": 1,
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True,
                           "content": "json", "transform": {"type": "function", "function": "{content}"}},
            "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
        },
    },
    "parameters": {
        "start_anchor": ["<|im_start|>assistant\n", "<|assistant|>"],
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
                "transform": CALL,
            },
            "content": {"close_pattern": r"\s*(?:<\|im_end\|>|\Z)", "content": "text"},
        },
    },
    "typed parameters": {
        "start_anchor_pattern": r"<\|assistant\|>\s?",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<call (?P<name>[\w.-]+)>", "close": "</call>", "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>", "merge_duplicates": True,
                                 "value_parser": {"name": "json", "args": {"allow_non_json": True}}},
                "transform": CALL,
            },
            "content": {},
        },
    },
    "turns": {
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": CALL,
            },
            "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
        },
    },
    "channels": {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>",
                                  "repeats": True, "join": "\n"},
            "tool_calls": {
                "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
                "close": "<|call|>", "repeats": True, "content": "json", "transform": CALL,
            },
            "content": {"open_pattern": r"<\|channel\|>final.*?<\|message\|>", "close": ["<|return|>", "<|end|>"]},
        },
    },
    "actions": {
        "start_anchor": "<|CHATBOT|>",
        "fields": {
            "reasoning": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
            "tool_calls": {
                "open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json", "transform_each": True,
                "transform": {"type": "function",
                              "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            },
            "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
            "citations": {"open": "<co>", "close": "</co>", "repeats": True},
        },
    },
    "python": {
        "start_anchor": "<|assistant|>",
        "fields": {
            "tool_calls": {
                "open": "<|calls|>", "close": "<|end_calls|>", "content": "python-call-list",
                "transform_each": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            },
            "content": {"content_args": {"strip": False}},
        },
    },
    "lines": {
        "start_anchor": "<|assistant|>",
        "fields": {
            "tool_calls": {
                "open_pattern": r"#(?P<name>\w+)\n", "close": "##", "repeats": True,
                "content": "kv-lines",
                "content_args": {"kv_sep": "=", "value_parser": {"name": "int"}}, "transform": CALL,
            },
            "content": {"close": ["<end>", "<end>!"]},
        },
    },
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
    "n": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"}, "s": {"type": "string"},
    "o": {"type": ["object", "null"]}, "l": {"type": "array"}}}}}]

TURN = "<|im_start|>user\nhi <think> </tool_call><|im_end|>\n<|im_start|>assistant\n"
CASES = [
    ("tags", "plain", "", "Hello."),
    ("tags", "nothing", TURN, ""),
    ("tags", "blanks", TURN, " \n "),
    ("tags", "a thought and content", TURN, "<think>\nWhy?\n\n</think>\n\nHello, \n world.<|im_end|>\n<|endoftext|>"),
    ("tags", "a thought that the prompt opens", TURN + "<think>\n", "Why?\n</think>\n\nHello."),
    ("tags", "a thought that the prompt closes", TURN + "<think>\n\n</think>\n\n", "Hello."),
    ("tags", "a thought that is cut", TURN, "<think>\nWhy </thin"),
    ("tags", "one call", TURN, '<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call><|im_end|>'),
    ("tags", "a thought and two calls", TURN, '<think>a < b</think>\n<tool_call>{"name": "f", "arguments": {}}'
     '</tool_call>\n<tool_call>{"name": "g", "arguments": {"x": "</think>"}}</tool_call>'),
    ("tags", "content before a call", TURN, 'Let me see.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("tags", "a call without its end", TURN, '<tool_call>{"name": "f", "arguments": {"a": 1}}'),
    ("tags", "a tag in content", TURN, "a <tool_cal b </think> c <|im_en"),
    ("tags", "an earlier turn", TURN + "<think>x<|im_end|>\n" + TURN, "y"),
    ("tags", "wide characters", TURN, "<think>日本\u3000</think>\u3000é\u0301 🎉 日 "),
    ("parameters", "a call", TURN, "<tool_call>\n<function=f>\n<parameter=s>\na\nb\n</parameter>\n<parameter=n>\n7\n"
     "</parameter>\n</function>\n</tool_call>"),
    ("parameters", "types", TURN, "Yes.<tool_call><function=f><parameter=n>7</parameter><parameter=x>1.5</parameter>"
     "<parameter=b>True</parameter><parameter=s>8</parameter><parameter=o>{\"a\": 1}</parameter><parameter=l>[1]"
     "</parameter><parameter=z>9</parameter></function></tool_call>", TOOLS),
    ("parameters", "casts that fail", TURN, "<tool_call><function=f><parameter=n>x</parameter><parameter=b>yes"
     "</parameter><parameter=o>null</parameter><parameter=l>[1</parameter></function></tool_call>", TOOLS),
    ("parameters", "no parameters", TURN, "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<|im_end|>"),
    ("parameters", "two calls in a thought", TURN + "<think>\n", "x <tool_call><function=f></function></tool_call>"
     "</think>\n<tool_call><function=g><parameter=a>1</parameter></function></tool_call>"
     "<tool_call><function=h></function></tool_call>"),
    ("typed parameters", "values", "<|assistant|> ", "<call a.b-c><x>1</x><y>[true, null]</y><z> text </z></call> done"),
    ("typed parameters", "values of one name", "<|assistant|>", "<call f><x>1</x><x>2</x><y>a</y><x>3</x></call>"),
    ("turns", "a call", "<|turn>model\n", '<|tool_call>call:f{a:<|"|>it\'s "x", {b: 1}<|"|>,n:-1.5,l:[true,null],'
     'o:{k : <|"|><|"|>}}<tool_call|><|tool_response>'),
    ("turns", "quoted names", "<|turn>model\n", '<|tool_call>call:f{"a, b:": "c, d: e", x_1: 2}<tool_call|>'),
    ("turns", "a thought", "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>Yes <|chan<turn|>"),
    ("turns", "after a result", "<|turn>model\n<|channel>thought\nx<tool_response|>", "It is 5.<turn|>"),
    ("channels", "all of them", "<|start|>assistant", "<|channel|>analysis<|message|>One.<|end|><|start|>assistant"
     "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
     "<|constrain|>json<|message|>{\"a\": 1}<|call|>"),
    ("channels", "the last word", "<|start|>assistant", "<|channel|>final <|constrain|>json<|message|>{}<|return|>"),
    ("channels", "a call with its end missing", "<|start|>assistant",
     "<|channel|>commentary to=functions.f<|message|>{\"a\": 1}"),
    ("actions", "calls in a list", "<|CHATBOT|>", "<|START_THINKING|>Two.<|END_THINKING|><|START_ACTION|>[\n"
     "{\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"a\": 1}},\n{\"tool_name\": \"g\", "
     "\"parameters\": {}}]<|END_ACTION|>"),
    ("actions", "fields of other names", "<|CHATBOT|>", "x<|START_RESPONSE|>a<co>b</co> <|END_RESPONSE|><co>c</co>"),
    ("python", "two calls", "<|assistant|>", "<|calls|>[f(a='x', b=[1, 2.5, None]), g.h()]<|end_calls|>\n"),
    ("python", "no calls", "<|assistant|>", "<|calls|>[]<|end_calls|>x"),
    ("lines", "a call", "<|assistant|>", "#f\na = 1\n\nb=-2\nno pair\n##ok<end>"),
    ("lines", "the longer mark", "<|assistant|>", "ok<end>!"),
]
# The library deliberately treats these otherwise, for the reasons given.
DIFFERENT = {
    ("tags", "content on both sides of a call"): (
        TURN, 'One.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\nTwo.', {"content": "One.Two."},
        "Transformers keeps the last text of a field that does not repeat; it has been told already here."),
    ("tags", "what the prompt has of the answer"): (
        TURN + "Sure, ", "here.", {"content": "here."}, "What the prompt has is not a part of the answer here."),
    ("tags", "a call that is none"): (
        TURN, "a <tool_call>f(1)</tool_call> b", {"content": "a<tool_call>f(1)</tool_call>b"},
        "Transformers fails; here a call that is none is content."),
    ("parameters", "a call that is cut"): (
        TURN, "<tool_call><function=f><parameter=a>1</parameter><parameter=b>2", {"incomplete": 1},
        "Transformers does not tell a call that has been cut from a whole one."),
    ("channels", "arguments that are cut"): (
        "<|start|>assistant", "<|channel|>commentary to=functions.f<|message|>{\"a\": ",
        {"incomplete": 1, "tool_calls": [{"name": "f", "arguments": "{\"a\": "}]},
        "Transformers fails; the name is known, and the arguments are where they stopped."),
}


def message_of(template, prefix, text, tools):
    try:
        return parse_response(text, TEMPLATES[template], prefix=prefix, tools=tools)
    except (ValueError, KeyError):
        return None


def main():
    cases = []
    for template, name, prefix, text, *tools in CASES:
        tools = tools[0] if tools else None
        case = {"name": f"{template}: {name}", "template": template, "prefix": prefix, "text": text, "tools": tools}
        case["message"] = message_of(template, prefix, text, tools)
        assert case["message"] is not None, case
        cases.append(case)
    for (template, name), (prefix, text, here, note) in DIFFERENT.items():
        cases.append({"name": f"{template}: {name}", "template": template, "prefix": prefix, "text": text,
                      "tools": None, "message": message_of(template, prefix, text, None), "here": here,
                      "note": note})
    with open(os.path.join(HERE, "templates.json"), "w", encoding="utf-8") as file:
        json.dump({"about": "Written by make_templates.py with Transformers 5.24.0.", "templates": TEMPLATES,
                   "cases": cases}, file, ensure_ascii=False, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
