// SPDX-License-Identifier: Apache-2.0

package account

// Claim is what the share of a tenant says of its part of a GPU.
type Claim struct {
	Request, Weight int
	Limit           int // percent; 0: none
}

// most is what its limit allows a tenant, of One.
func (c Claim) most() int64 {
	if c.Limit > 0 {
		return int64(c.Limit) * One / 100
	}
	return One
}

func (c Claim) request() int64 { return int64(c.Request) * One / 100 }

// Dues says what tenants get of the GPU in the long run while those that want it now
// go on wanting it, also those that their core limit keeps away at this moment: what each
// was promised, and as much of the rest as its weight says, up to its limit. What a limit
// leaves is for the others.
type Dues struct {
	claims        []Claim // of those that want the GPU
	rest, weights int64   // of tenants below their limits: what weights share out, of One
}

// NewDues works out the dues of tenants that want the GPU.
func NewDues(claims []Claim) Dues {
	d := Dues{claims: claims}
	capped := make([]bool, len(claims))
	for more := true; more; {
		more = false
		d.rest, d.weights = One, 0
		for i, c := range claims {
			if capped[i] {
				d.rest -= c.most()
			} else {
				d.rest -= c.request()
				d.weights += int64(c.Weight)
			}
		}
		d.rest = max(d.rest, 0)
		for i, c := range claims {
			if !capped[i] && c.Limit > 0 && d.Of(c) >= c.most() {
				capped[i], more = true, true
			}
		}
	}
	return d
}

// Unlimited makes the dues those of tenants without limits, by the sums of what they claim.
func (d *Dues) Unlimited(requests, weights int) {
	d.rest, d.weights = max(One-int64(requests)*One/100, 0), int64(weights)
}

// Of returns what a tenant gets that is among those that want the GPU, of One.
func (d *Dues) Of(c Claim) int64 {
	if d.weights == 0 { // all are at their limits
		return c.most()
	}
	return min(c.request()+d.rest*int64(c.Weight)/d.weights, c.most())
}

// Part returns the part of the GPU by which a tenant's virtual time passes, of One: its due, or
// what would be its due if it wanted the GPU and had no limit. The parts of others do not change
// while a limit keeps a tenant away. If what it was promised went to them by their weights
// meanwhile, those that were promised much would get too little.
func (d *Dues) Part(c Claim, wants bool) int64 {
	rest, weights := d.rest, d.weights
	switch {
	case !wants:
		rest, weights = max(rest-c.request(), 0), weights+int64(c.Weight)
	case c.Limit > 0 && d.Of(c) == c.most():
		rest, weights = rest+c.most()-c.request(), weights+int64(c.Weight)
	}
	return min(max(c.request()+max(rest, 0)*int64(c.Weight)/weights, MinPart), One)
}

// Permille returns what a tenant gets if it wants the GPU beside those that do.
func (d *Dues) Permille(c Claim, wants bool) int {
	if !wants {
		beside := NewDues(append(d.claims[:len(d.claims):len(d.claims)], c))
		d = &beside
	}
	return int(max(d.Of(c), MinPart) * 1000 / One)
}

// Same says whether others' dues are the same.
func (d *Dues) Same(o *Dues) bool { return d.rest == o.rest && d.weights == o.weights }
