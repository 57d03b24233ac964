// SPDX-License-Identifier: Apache-2.0

package api

import "strings"

// Misspelt returns which of names somebody has meant who wrote word, "" if none is like it: one
// that differs in two letters at most, or else the first of which it is the beginning.
func Misspelt(word string, names []string) string {
	meant, least := "", 3
	for _, name := range names {
		if d := Distance(word, name); d < least {
			meant, least = name, d
		}
	}
	for _, name := range names {
		if meant == "" && strings.HasPrefix(name, word+"-") {
			meant = name
		}
	}
	return meant
}

// Distance is how many letters have to be put in, removed or replaced to make b of a.
func Distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
