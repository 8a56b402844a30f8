"""Conformance tests of the wire protocol, for any server at a socket: `uma-conformance --socket PATH`.

Each case belongs to a rule of docs/reference/protocol.md: case 1.3.2 is the second one of section 1, rule 3. The cases build bytes and
read frames themselves. Of the rest of `uma_protocol` they use constants only, so that a fault of that library shows too.
"""
