# SPDX-License-Identifier: Apache-2.0
"""Measures C++ and CUDA sources with tree-sitter: functions, classes, comments, headers.

A function's lines run from its return type to its closing brace; a lambda is part of the function
that it stands in. A class's declarations are its member functions (each overload), data members,
nested types, aliases, using and friend declarations. Needs tree-sitter and tree-sitter-cpp
(integrations/requirements.txt).
"""
import dataclasses
import re

import tree_sitter
import tree_sitter_cpp

LANGUAGE = tree_sitter.Language(tree_sitter_cpp.language())
# A parse error inside of an expression is local. One this long may hide a function or a class.
LONGEST_ERROR = 8

# What the grammar does not know: annotations, CUDA's and Highway's attributes, and macros whose
# argument is a declaration. They become spaces, with their arguments, before a file is parsed.
ATTRIBUTES = re.compile(
    rb"\b(?:KVS_(?:ASSIGN_OR_RETURN|RETURN_IF_ERROR|HOST_DEVICE|API|CAPABILITY|SCOPED_CAPABILITY"
    rb"|GUARDED_BY|REQUIRES|EXCLUDES|ACQUIRE|RELEASE|NO_THREAD_SAFETY_ANALYSIS)"
    rb"|__(?:global|device|host|shared|constant|forceinline|noinline|restrict|grid_constant"
    rb"|launch_bounds)__|HWY_(?:ATTR|INLINE|NOINLINE|API|RESTRICT|BEFORE_NAMESPACE"
    rb"|AFTER_NAMESPACE))\b")
CLASS_TYPES = ("class_specifier", "struct_specifier", "union_specifier")
NESTED_TYPES = (*CLASS_TYPES, "enum_specifier")
ONE_DECLARATION = ("function_definition", "declaration", "template_declaration",
                   "friend_declaration", "alias_declaration", "type_definition",
                   "using_declaration")
QUERY = tree_sitter.Query(LANGUAGE, "(function_definition) @function (comment) @comment"
                          + " ".join(f"({t} body: (_)) @class" for t in CLASS_TYPES)
                          + "(ERROR) @error")


@dataclasses.dataclass
class CppMeasures:
    functions: list  # (qualified name, lines)
    classes: list    # (qualified name, declarations)
    interfaces: list  # (qualified name, virtual functions), destructors and overrides not counted
    comments: list   # texts
    placed: list     # the same, as comments.begin_with_of wants them
    errors: list     # numbers of lines from which too much could not be parsed


def measure(source):
    """CppMeasures of the bytes of one file."""
    tree = tree_sitter.Parser(LANGUAGE).parse(without_attributes(source))
    found = {kind: sorted(nodes, key=lambda n: n.start_byte) for kind, nodes
             in tree_sitter.QueryCursor(QUERY).captures(tree.root_node).items()}
    functions = [(qualified_name(n), line_count(n)) for n in found.get("function", ())
                 if n.child_by_field_name("body")]
    classes = [(qualified_name(n), declarations(n.child_by_field_name("body")))
               for n in found.get("class", ())]
    interfaces = [(qualified_name(n), count) for n in found.get("class", ())
                  if (count := virtual_functions(n.child_by_field_name("body")))]
    nodes = sorted(found.get("comment", ()), key=lambda n: n.start_byte)
    comments = [source[n.start_byte:n.end_byte].decode(errors="replace") for n in nodes]
    placed = [(n.start_point[0] + 1, n.start_point[1], begins_line(source, n), text)
              for n, text in zip(nodes, comments)]
    errors = [n.start_point[0] + 1 for n in found.get("error", ()) if line_count(n) > LONGEST_ERROR]
    return CppMeasures(functions, classes, interfaces, comments, placed, errors)


def begins_line(source, node):
    return not source[node.start_byte - node.start_point[1]:node.start_byte].strip()


def line_count(node):
    return node.end_point[0] - node.start_point[0] + 1


def without_attributes(source):
    """`source` with ATTRIBUTES and their arguments as spaces; every other byte keeps its place."""
    out = bytearray(source)
    for match in ATTRIBUTES.finditer(source):
        line = source[source.rfind(b"\n", 0, match.start()) + 1:match.start()]
        if line.lstrip().startswith((b"#", b"//")):
            continue
        end = match.end()
        if source[end:end + 1] == b"(":
            end = end_of_parentheses(source, end)
        out[match.start():end] = re.sub(rb"[^\n]", b" ", source[match.start():end])
    return bytes(out)


def end_of_parentheses(source, at):
    depth = 0
    for match in re.compile(rb'[()]|"(?:\\.|[^"\\\n])*"').finditer(source, at):
        depth += {b"(": 1, b")": -1}.get(match.group(), 0)
        if depth == 0:
            return match.end()
    return len(source)


def declarations(body):
    """How many declarations the members between the braces of a class are."""
    count = 0
    for node in body.named_children:
        if node.type == "field_declaration":
            declared = len(node.children_by_field_name("declarator"))
            kind = node.child_by_field_name("type")
            nested = kind is not None and kind.type in NESTED_TYPES and (
                declared == 0 or kind.child_by_field_name("body") is not None)
            count += declared + nested
        elif node.type in ONE_DECLARATION:
            count += 1
        elif node.type.startswith("preproc_"):
            count += declarations(node)
    return count


def virtual_functions(body):
    """How many functions a class makes virtual itself."""
    return sum(text_of(node).startswith("virtual ") and "~" not in text_of(node).split("(")[0]
               for node in body.named_children)


def qualified_name(node):
    """The name with those of the classes and functions around it, without namespaces."""
    names = []
    while node is not None:
        if node.type in CLASS_TYPES:
            names.append(text_of(node.child_by_field_name("name")) or "(anonymous)")
        elif node.type == "function_definition":
            names.append(function_name(node))
        node = node.parent
    return "::".join(reversed(names))


def function_name(definition):
    node = definition.child_by_field_name("declarator")
    # A conversion has no declarator below: `operator bool()`, or `A::operator bool()`.
    while node.type not in ("function_declarator", "operator_cast", "qualified_identifier"):
        inner = node.child_by_field_name("declarator") or next(
            (c for c in node.named_children if c.type.endswith("declarator")), None)
        if inner is None:
            break
        node = inner
    if node.type != "function_declarator":
        return text_of(node).split("(")[0].strip()
    name = text_of(node.child_by_field_name("declarator"))
    # A test of GoogleTest: its macro is the name, its suite and its own name are the parameters.
    if re.fullmatch(r"[A-Z][A-Z_]+", name):
        name += text_of(node.child_by_field_name("parameters"))
    return name


def text_of(node):
    return " ".join(node.text.decode(errors="replace").split()) if node is not None else ""
