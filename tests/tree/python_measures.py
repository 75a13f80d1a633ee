# SPDX-License-Identifier: Apache-2.0
"""Measures Python sources with the standard `ast`: functions, comments and docstrings.

A function's lines run from `def` to its last statement, docstring included; functions in it are
part of it, and are measured by themselves too.
"""
import ast
import io
import tokenize

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef)


def functions(source):
    """(qualified name, lines) of each function."""
    found = []

    def visit(node, scope):
        for child in ast.iter_child_nodes(node):
            inner = (*scope, child.name) if isinstance(child, SCOPES) else scope
            if isinstance(child, FUNCTIONS):
                found.append((".".join(inner), child.end_lineno - child.lineno + 1))
            visit(child, inner)

    visit(ast.parse(source), ())
    return found


def comments(source):
    """Texts of comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = [t.string for t in tokens if t.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, *SCOPES)):
            texts.append(ast.get_docstring(node) or "")
    return texts
