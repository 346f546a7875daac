# Shows the values, which are variables of the environment, in the ways of a plain shell.
printf 'set\037\037'; set; printf '\036'
printf 'export -p\037\037'; export -p; printf '\036'
exec 2> "$2/trace"
at=0
while [ "$at" -lt "$1" ]; do
  eval "value=\"\$V$at\""
  printf 'echo\037%s\037' "$at"; echo "$value"; printf '\036'
  printf 'set -x\037%s\037' "$at" >&2
  set -x; : "$value"; { set +x; } 2> /dev/null
  printf '\036set -x of an assignment\037%s\037' "$at" >&2
  set -x; copy="$value"; { set +x; } 2> /dev/null
  printf '\036' >&2
  at=$((at + 1))
done
