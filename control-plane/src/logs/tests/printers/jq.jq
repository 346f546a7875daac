# Shows every value in the ways of jq. Values come as one array.
def shown(name; f): [name, "\u001f", "\(.key)", "\u001f", (.value | f), "\u001e"] | add;
to_entries | map(
  shown("@json"; @json), shown("@sh"; @sh), shown("@uri"; @uri), shown("@html"; @html),
  shown("!@base64"; @base64), shown("@csv"; [.] | @csv), shown("@tsv"; [.] | @tsv),
  shown("tojson, twice"; tojson | tojson), shown("@sh of json"; {a: .} | tojson | @sh),
  shown("json of @sh"; @sh | @json), shown("@html of json"; @json | @html)
) | add
