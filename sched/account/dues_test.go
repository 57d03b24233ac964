// SPDX-License-Identifier: Apache-2.0

package account

import (
	"cmp"
	"testing"
)

// What tenants are due adds up to the whole GPU, unless all are at their limits.
func TestDues(t *testing.T) {
	for _, tc := range []struct {
		name string
		all  []Claim
		idle *Claim // of one that wants nothing now
		want []int  // permille, the idle one's last
	}{
		{"alone", []Claim{{}}, nil, []int{1000}},
		{"alone with a limit", []Claim{{Limit: 25}}, nil, []int{250}},
		{"two", []Claim{{}, {}}, nil, []int{500, 500}},
		{"two and an idle one", []Claim{{}, {}}, &Claim{}, []int{500, 500, 333}},
		{"a limit below its part", []Claim{{Limit: 25}, {}}, nil, []int{250, 750}},
		{"a limit above its part", []Claim{{Limit: 60}, {}}, nil, []int{500, 500}},
		{"limits that leave something", []Claim{{Limit: 25}, {Limit: 30}}, nil, []int{250, 300}},
		{"what one leaves brings no other above its limit", []Claim{{Limit: 10}, {Limit: 40}, {}}, nil, []int{100, 400, 500}},
		{"a promise and weights", []Claim{{Request: 40}, {Weight: 200}, {Weight: 300}}, nil, []int{500, 200, 300}},
		{"an idle one with a limit", []Claim{{}}, &Claim{Limit: 20}, []int{1000, 200}},
		{"all is promised", []Claim{{Request: 60}, {Request: 40}, {}}, nil, []int{600, 400, 0}},
	} {
		for i := range tc.all {
			tc.all[i].Weight = cmp.Or(tc.all[i].Weight, 100)
		}
		d, of := NewDues(tc.all), tc.all
		if tc.idle != nil {
			tc.idle.Weight = 100
			of = append(of[:len(of):len(of)], *tc.idle)
		}
		for i, c := range of {
			got := d.Permille(c, i < len(tc.all))
			if max(got-tc.want[i], tc.want[i]-got) > 1 {
				t.Errorf("%s: %d is due %d permille, want %d", tc.name, i, got, tc.want[i])
			}
		}
	}
}
