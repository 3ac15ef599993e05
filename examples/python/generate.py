"""Answers a question, printing the text as it is generated:  python3 generate.py MODEL [QUESTION]"""

import sys

import xserv


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    question = sys.argv[2] if len(sys.argv) > 2 else "Tell me a story."
    try:
        with xserv.Model(sys.argv[1]) as model:
            pieces = model.generate(messages=[{"role": "user", "content": question}], max_tokens=256, stream=True)
            for piece in pieces:
                print(piece, end="", flush=True)
            print()
    except xserv.Error as error:
        print(f"{error} ({error.status})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
