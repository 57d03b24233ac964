// SPDX-License-Identifier: Apache-2.0

// Package mutants gives a fuzz target inputs in a plain test run: its seeds and changed
// seeds, the same each time. make fuzz searches further, by the code that inputs reach.
package mutants

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// Run runs a target with executions inputs, made from seeds of the same types. A
// failure names the input.
func Run(t *testing.T, seeds [][]any, target func(t *testing.T, input []any)) {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range executions {
		input := slices.Clone(seeds[i%len(seeds)])
		if i >= len(seeds) {
			for range 1 + rng.IntN(4) {
				k := rng.IntN(len(input))
				input[k] = mutate(rng, input[k], seeds[rng.IntN(len(seeds))][k])
			}
		}
		run(t, input, target)
	}
}

func run(t *testing.T, input []any, target func(*testing.T, []any)) {
	defer func() {
		if t.Failed() {
			t.Logf("with %q", fmt.Sprint(input...))
		}
	}()
	target(t, input)
}

// mutate returns a changed value; other is one of its type.
func mutate(rng *rand.Rand, v, other any) any {
	switch v := v.(type) {
	case []byte:
		return change(rng, v, other.([]byte))
	case string:
		return string(change(rng, []byte(v), []byte(other.(string))))
	case uint8:
		return uint8(rng.Uint32())
	}
	panic(fmt.Sprintf("mutants: no change of a %T", v))
}

// telling are bytes that often reach other code.
const telling = "\x00\x01\x7f\x80\xff019-.,:\"{}[]/ "

// change changes a copy of b.
func change(rng *rand.Rand, b, other []byte) []byte {
	b = slices.Clone(b)
	at := rng.IntN(len(b) + 1)
	part := func(of []byte) []byte {
		from := rng.IntN(len(of) + 1)
		return of[from : from+rng.IntN(min(len(of)-from, 32)+1)]
	}
	switch rng.IntN(7) {
	case 0: // a bit
		if at < len(b) {
			b[at] ^= 1 << rng.IntN(8)
		}
	case 1:
		if at < len(b) {
			b[at] = telling[rng.IntN(len(telling))]
		}
	case 2: // any byte
		b = slices.Insert(b, at, byte(rng.Uint32()))
	case 3: // without a part
		b = slices.Delete(b, at, at+rng.IntN(min(len(b)-at, 32)+1))
	case 4: // a part twice
		b = slices.Insert(b, at, slices.Clone(part(b))...)
	case 5: // a part of another
		b = slices.Insert(b, at, part(other)...)
	case 6: // the end of another
		b = append(b[:at], other[min(at, len(other)):]...)
	}
	return b[:min(len(b), 64<<10)]
}
