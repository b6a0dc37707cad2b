"""Python source as a tree, whatever CPython 3.11 does to it."""

import ast

TRIES_MAX = 5


def parse(text: str) -> ast.Module:
    """ast.parse; once more where a thread that other tests left took a turn while the tree was built.

    CPython 3.11 keeps the depth of that recursion in one place for all threads, and then raises SystemError ("AST
    constructor recursion depth mismatch", python/cpython#106905). The source is right.
    """
    for _ in range(TRIES_MAX - 1):
        try:
            return ast.parse(text)
        except SystemError:
            continue
    return ast.parse(text)
