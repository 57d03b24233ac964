#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every driver function of every CUDA version that names/ lists has one class,
# what submits work has a wrapper, and each wrapper has the parameters of the
# function it stands for. classify.sh [LIST...]: other lists than names/*.txt.
set -eu
here=$(dirname "$0")
[ $# -gt 0 ] || set -- "$here"/names/*.txt
hook=$here/..
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

quote="-iquote $hook"
for layer in os rm core memory swap cuda nvml; do
	quote="$quote -iquote $hook/$layer"
done

# "CLASS NAME" of each name in the table.
expand() { # MACRO CLASS, with the macro's parameter declared as it comes
	printf '#undef G\n#undef H\n#define G(name, P, A, key) @%s@name\n#define H(name) @%s@name\n%s(%s)\n' \
		"$2" "$2" "$1" "$3"
}
{
	printf '#include "%s/cuda/symbols.h"\n' "$hook"
	expand NVS_GATED_LAUNCH submit G
	expand NVS_GATED_COPY copy G
	expand NVS_GATED_SET set G
	expand NVS_GATED_MOVE move G
	expand NVS_BY_HAND submit H
	expand NVS_RESOLVERS info H
	expand NVS_CONTEXTS context H
	expand NVS_STREAMS stream H
	expand NVS_MEM_OPS never H
	expand NVS_MEM_OP_NODES graph H
	expand NVS_NAMES names H
	expand NVS_MEMORY memory H
	expand NVS_UNGATED_ALLOCATE allocate H
	expand NVS_UNGATED_FREE free H
	expand NVS_UNGATED_INFO info H
	expand NVS_UNGATED_CONTEXT context H
	expand NVS_UNGATED_STREAM stream H
	expand NVS_UNGATED_EVENT event H
	expand NVS_UNGATED_NEVER never H
	expand NVS_UNGATED_GRAPH graph H
	expand NVS_UNGATED_GRAPHICS event H
	expand NVS_UNGATED_CODE pass H
	expand NVS_UNGATED_REST pass H
	expand NVS_UNGATED_OLD old H
} | ${CC:-gcc} -E -P $quote - | tr -s ' ;' '\n' | sed -n 's/^@\([a-z]*\)@/\1 /p' >"$tmp/classes"
awk '!/^#/ { for (i = 2; i <= NF; i++) print $1, $i }' "$hook/cuda/ungated.txt" >>"$tmp/classes"

# "NAME SIZE..." of each wrapper.
for f in "$hook"/[a-su-z]*/*.c; do
	grep -qE '^[[:blank:]]*(WRAPPER|GATED|NVS_GATED_TABLE)\(' "$f" || continue
	${CC:-gcc} -E -P $quote "$f"
done | tr '\n' ' ' | grep -oE '\<int cu[A-Z][A-Za-z0-9_]* *\([^()]*\) *\{' | tr '(,){' ' ,,' >"$tmp/wrappers"

awk '
function bad(text) { print text; failed = 1 }
function size_of(type) {
	gsub(/ const |^ *const /, " ", type)
	if (type ~ /\*/)
		return 8
	sub(/[a-z_A-Z0-9]+ *$/, "", type) # its name
	gsub(/^ +| +$/, "", type)
	if (type in sizes)
		return sizes[type]
	bad("a parameter of type \"" type "\": say its size in classify.sh")
	return 0
}
BEGIN {
	sizes["CUdeviceptr"] = sizes["size_t"] = sizes["unsigned long long"] = sizes["uint64_t"] = 8
	sizes["uint"] = sizes["int"] = sizes["uint32_t"] = 4
	sizes["unsigned short"] = 2
	sizes["unsigned char"] = 1
	sizes["struct cu_location"] = "s8"
	sizes["struct cu_ipc_handle"] = "s64"
}
FILENAME ~ /classes$/ {
	if ($2 in class)
		bad($2 " is classified twice: " class[$2] " and " $1)
	class[$2] = $1
	next
}
FILENAME ~ /wrappers$/ {
	sub(/^int /, "")
	name = $1
	sub(/^[A-Za-z0-9_]+ /, "")
	n = split($0, p, ",")
	all = ""
	for (i = 1; i < n; i++)
		if (p[i] !~ /^ *(void)? *$/)
			all = all " " size_of(p[i])
	wrapper[name] = all
	next
}
/^#/ { next }
{
	listed[$1] = 1
	if (!($1 in class))
		bad(FILENAME ": " $1 " is in no section of symbols.h, ungated.h or ungated.txt")
	else if (class[$1] !~ /^(submit|copy|set|move|old)$/ && $1 !~ /^cuMem[A-Z].*Get/ &&
		 $1 ~ /^cu(Launch|Graph(Launch|Upload)|Mem(cpy|set|.*(Prefetch|Discard|Decompress)))/)
		bad(FILENAME ": " $1 " looks like work for a GPU and has no gated wrapper")
	if (FILENAME !~ /driver-/) {
		name = $1
		sub(/^[^ ]+/, "")
		prototype[FILENAME, name] = $0
		lists[FILENAME] = 1
	}
}
END {
	for (name in class)
		total[class[name]]++
	for (name in wrapper)
		for (list in lists) {
			if (!((list, name) in prototype))
				continue
			ours = wrapper[name]
			theirs = prototype[list, name]
			# Some functions of the pre-3.2 API have sizes of 32 bits.
			if (!(name ~ /_v[2-9]/) && (name "_v2" in listed)) {
				gsub(/8/, "4", ours)
				gsub(/8/, "4", theirs)
			}
			checked++
			if (ours != theirs)
				bad(list ": " name " has parameters of" theirs ", its wrapper of" ours)
		}
	for (name in class)
		if (class[name] ~ /^(submit|copy|set|move)$/ && !(name in wrapper))
			bad(name " is gated and has no wrapper")
	for (name in class)
		if (class[name] == "old" && !((name "_v2") in class))
			bad(name " is of the old functions, and has no _v2")
	if (failed)
		exit 1
	for (c in total)
		summary = summary " " c " " total[c]
	print "classify: " length(listed) " names,", checked, "prototypes of wrappers;" summary
}' "$tmp/classes" "$tmp/wrappers" "$@" >"$tmp/out" || {
	sort -u "$tmp/out" >&2
	exit 1
}
cat "$tmp/out"
