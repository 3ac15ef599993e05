#!/usr/bin/env python3
"""Makes json-schema-test-suite.json of the draft 2020-12 of a checkout of JSON-Schema-Test-Suite (MIT; LICENSE is
beside it): the schemas of the keywords that concern constraints, each with its valid and invalid instances.

    python3 make.py CHECKOUT

The suite checks validators, to which the order of properties means nothing; here they come in the order of the schema,
which constraints demand, if the schema itself lists them.
"""

import json
import pathlib
import shutil
import sys

FILES = """additionalProperties allOf anchor anyOf boolean_schema const contains default defs dependentRequired
dependentSchemas enum exclusiveMaximum exclusiveMinimum if-then-else infinite-loop-detection items maxItems maxLength
maxProperties maximum minItems minLength minProperties minimum multipleOf not oneOf pattern patternProperties
prefixItems properties propertyNames ref required type unevaluatedItems uniqueItems refRemote""".split()


def main() -> None:
    checkout = pathlib.Path(sys.argv[1])
    here = pathlib.Path(__file__).parent
    cases = []
    for name in FILES:
        for case in json.loads((checkout / "tests/draft2020-12" / f"{name}.json").read_text()):
            tests = [{"data": in_order(case["schema"], t["data"]), "valid": t["valid"]} for t in case["tests"]]
            cases.append({"name": f"{name}: {case['description']}", "schema": case["schema"], "tests": tests})
    lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
    (here / "json-schema-test-suite.json").write_text(f"[\n{lines}\n]\n")
    shutil.copy(checkout / "LICENSE", here / "LICENSE")


def in_order(schema: object, data: object) -> object:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or not isinstance(data, dict):
        return data
    listed = {key: data[key] for key in properties if key in data}
    return {**listed, **{key: value for key, value in data.items() if key not in listed}}


main()
