"""Shows every value in the ways of Python. Values come in a file, each with a zero byte behind it."""
import base64, binascii, csv, html, io, json, pprint, re, shlex, sys, textwrap, traceback
from urllib.parse import quote, quote_plus, urlencode
from xml.sax.saxutils import escape, quoteattr

def row(value):
    text = io.StringIO()
    csv.writer(text).writerow(["a", value])
    return text.getvalue()

def error(value):
    try:
        raise ValueError(value)
    except ValueError:
        return traceback.format_exc()

PLAIN = {
    "str": str, "repr": repr, "ascii": ascii, "repr of repr": lambda v: repr(repr(v)),
    "repr of bytes": lambda v: repr(v.encode()), "pprint": lambda v: pprint.pformat({"a": v, "b": [v]}, width=1000),
    "a command": lambda v: repr(["curl", "-u", f"user:{v}", v]),
    "json": json.dumps, "json not in ascii": lambda v: json.dumps(v, ensure_ascii=False),
    "json, twice": lambda v: json.dumps(json.dumps({v: v})),
    "json, twice, not in ascii": lambda v: json.dumps(json.dumps(v, ensure_ascii=False), ensure_ascii=False),
    "json, three times": lambda v: json.dumps(json.dumps(json.dumps(v))),
    "repr of json": lambda v: repr(json.dumps(v)), "json of repr": lambda v: json.dumps(repr(v)),
    "repr of json as bytes": lambda v: repr(json.dumps(v, ensure_ascii=False).encode()),
    "json of shlex": lambda v: json.dumps("export P=" + shlex.quote(v)),
    "shlex of json": lambda v: "curl -d " + shlex.quote(json.dumps({"a": v})),
    "shlex of shlex": lambda v: "sh -c " + shlex.quote("echo " + shlex.quote(v)),
    "json of html": lambda v: json.dumps(html.escape(v)), "html of json": lambda v: html.escape(json.dumps(v)),
    "quote": quote, "quote of all": lambda v: quote(v, safe=""), "quote_plus": quote_plus,
    "quote of quote": lambda v: quote(quote(v, safe=""), safe=""),
    "quote of json": lambda v: quote(json.dumps(v)), "json of a query": lambda v: json.dumps(urlencode({"a": v})),
    "urlencode": lambda v: urlencode({"a": v}),
    "shlex": shlex.quote, "html": html.escape, "html of text": lambda v: html.escape(v, quote=False),
    "html of an address": lambda v: html.escape("?a=" + quote(v)),
    "html, twice": lambda v: html.escape(html.escape(v)),
    "xml": escape, "an attribute of xml": quoteattr,
    "xml in ascii": lambda v: v.encode("ascii", "xmlcharrefreplace").decode(),
    "ascii with replacements": lambda v: v.encode("ascii", "backslashreplace").decode(),
    "unicode_escape": lambda v: v.encode("unicode_escape").decode(),
    "re.escape": re.escape, "csv": row, "an error": error, "repr of an error": lambda v: repr(ValueError(v)),
    "indented": lambda v: textwrap.indent(v, "    | "), "%%": lambda v: v.replace("%", "%%"),
    "a format": lambda v: v.replace("{", "{{").replace("}", "}}"),
}
ENCODED = {
    "base64": lambda v: base64.b64encode(v.encode()).decode(),
    "base64 for addresses": lambda v: base64.urlsafe_b64encode(v.encode()).decode(),
    "hex": lambda v: v.encode().hex(), "HEX": lambda v: v.encode().hex().upper(),
    "base64 of json": lambda v: base64.b64encode(json.dumps(v, ensure_ascii=False).encode()[1:-1]).decode(),
}
with open(sys.argv[1], "rb") as file:
    values = file.read().decode().split("\0")[:-1]
out = io.StringIO(newline="")
for at, value in enumerate(values):
    for name, show in PLAIN.items():
        out.write(f"{name}\037{at}\037{show(value)}\036")
    for name, show in ENCODED.items():
        out.write(f"!{name}\037{at}\037{show(value)}\036")
sys.stdout.buffer.write(out.getvalue().encode())
