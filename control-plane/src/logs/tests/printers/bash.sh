# Shows every value in the ways of bash. Values come in a file, each with a zero byte behind it.
mapfile -d '' -t values < "$1"
exec 2> "$2/trace"
for at in "${!values[@]}"; do
  show() { printf '\036%s\037%s\037' "$1" "$at"; }
  value="${values[at]}"
  show 'printf %q'; printf '%q' "$value"; printf '\036'
  show '@Q'; printf '%s\036' "${value@Q}"
  show '@A'; printf '%s\036' "${value@A}"
  show 'declare -p'; declare -p value; printf '\036'
  one=("$value"); show 'an array'; declare -p one; printf '\036'
  declare -A named=(["$value"]="$value"); show 'a map'; declare -p named; printf '\036'
  show 'printf %q, twice'; printf -v quoted '%q' "$value"; printf '%q\036' "$quoted"
  show 'echo -e'; echo -e "$value"; printf "\n\036"
  show 'printf %b'; printf '%b\036' "$value"
  printf 'set -x\037%s\037' "$at" >&2
  set -x; : "$value"; { set +x; } 2> /dev/null
  printf '\036set -x of an assignment\037%s\037' "$at" >&2
  set -x; copy="$value"; { set +x; } 2> /dev/null
  printf '\036set -x of a test\037%s\037' "$at" >&2
  set -x; [[ $value == "$value" ]]; { set +x; } 2> /dev/null
  printf '\036an error\037%s\037' "$at" >&2
  cd -- "/$value" || :
  printf '\036another error\037%s\037' "$at" >&2
  [ "$value" -eq 1 ] || :
  printf '\036' >&2
  unset value copy one named quoted
  printf -v "V$at" '%s' "$value"
  declare -x "V$at=${values[at]}"
done
unset values
printf 'set\037\037'; set; printf '\036'
printf 'export -p\037\037'; export -p; printf '\036'
printf 'env\037\037'; env; printf '\036'
