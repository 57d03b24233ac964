// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/containerd/nri/pkg/api"

	sched "github.com/nvshare/nvshare/sched/api"
)

// Where GPUs are given by resource claims (package dra), a container's terms are those
// of its claims. Annotations may lower them, and say what the claims leave open.

// ClaimPart is a part of a GPU that a resource claim gives to containers.
type ClaimPart struct {
	Name  string // of the CDI device, without the kind
	Claim string // <namespace>/<name>
	GPU   string // UUID
	Terms sched.Terms
	// Admin has what the claim is to look at a GPU, and not to compute on it (adminAccess):
	// nobody has counted what its containers get, so they are promised nothing.
	Admin bool
}

// Claims knows the prepared claims of this node. dra.Store is one. The methods wait for
// nobody.
type Claims interface {
	// ByDevice and ByToken answer from memory.
	ByDevice(name string) (ClaimPart, bool)
	ByToken(token string) (ClaimPart, bool)
	// Load learns which claims other processes have prepared since. It reads a directory, so
	// no lock is held across it.
	Load()
}

// loadLimit bounds how long a handler waits for Load: a runtime drops a plugin that takes 2 s.
const loadLimit = 500 * time.Millisecond

// tokenEnv begins the variables by which containers name their shares: runtimes before
// containerd 2.3.4 do not tell NRI which CDI devices the kubelet asked for. A value is a
// random token that only the share's containers have, because a pod can set any
// variable.
const tokenEnv = "NVSHARE_CLAIM_"

// TokenVariable returns the variable that has a token. The token is of rand.Text: 26 letters
// and digits or more.
func TokenVariable(token string) string { return fmt.Sprintf("%s%.8s=%s", tokenEnv, token, token) }

var tokenForm = regexp.MustCompile(`^[A-Z2-7]{26,}$`)

// tokenIn returns the token that a variable has; false: it is not of the form of
// TokenVariable.
func tokenIn(variable string) (token string, ok bool) {
	if !strings.HasPrefix(variable, tokenEnv) {
		return "", false
	}
	_, token, _ = strings.Cut(variable, "=")
	return token, tokenForm.MatchString(token) && variable == TokenVariable(token)
}

// claimDevice matches the names of claims' CDI devices.
var claimDevice = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}-.`)

// learnShares has claims loaded, once, if containers name shares that are not known, which another
// process may have prepared. The lock is not held.
func (cs *Containers) learnShares(ctrs ...*api.Container) error {
	if cs.Claims == nil || !slices.ContainsFunc(ctrs, cs.namesUnknown) {
		return nil
	}
	loaded := make(chan struct{})
	go func() {
		defer close(loaded)
		cs.Claims.Load()
	}()
	select {
	case <-loaded:
		return nil
	case <-time.After(loadLimit):
		return fmt.Errorf("the records of prepared claims could not be read within %v: try again", loadLimit)
	}
}

// namesUnknown tells whether a container names a share that is not known. Who wrote the name does not
// matter: records are read then, which says who has which share.
func (cs *Containers) namesUnknown(ctr *api.Container) bool {
	return slices.ContainsFunc(claimDevices(nil, ctr, true), func(name string) bool {
		_, known := cs.Claims.ByDevice(name)
		return !known
	}) || slices.ContainsFunc(ctr.GetEnv(), func(e string) bool {
		token, ok := tokenIn(e)
		_, known := cs.Claims.ByToken(token)
		return ok && !known
	})
}

// claimDevices returns the CDI devices of claims that a container was given. The record of an
// earlier plugin counts only for a container that exists.
func claimDevices(pod *api.PodSandbox, ctr *api.Container, exists bool) []string {
	names := given(ctr)
	if exists {
		names = append(names, strings.Split(written(pod, ctr, ClaimAnnotation), ",")...)
	}
	return slices.DeleteFunc(names, func(name string) bool { return !claimDevice.MatchString(name) })
}

// sharesOf returns the shares that a container was given.
func (cs *Containers) sharesOf(pod *api.PodSandbox, ctr *api.Container, exists bool) (shares []ClaimPart, err error) {
	add := func(s ClaimPart) {
		if !slices.ContainsFunc(shares, func(o ClaimPart) bool { return o.Name == s.Name }) {
			shares = append(shares, s)
		}
	}
	for _, name := range claimDevices(pod, ctr, exists) {
		s, ok := cs.Claims.ByDevice(name)
		if !ok {
			return nil, fmt.Errorf("CDI device %s is of a claim that is not prepared on this node", name)
		}
		add(s)
	}
	for _, e := range ctr.GetEnv() {
		if token, ok := tokenIn(e); ok {
			if s, ok := cs.Claims.ByToken(token); ok { // else somebody else's variable
				add(s)
			}
		}
	}
	return shares, nil
}

// claimed changes a request to what the container's claims give. It refuses what
// claims cannot give.
func (cs *Containers) claimed(r *Request, pod *api.PodSandbox, ctr *api.Container, exists bool) error {
	if cs.Claims == nil {
		return nil
	}
	shares, err := cs.sharesOf(pod, ctr, exists)
	if err != nil {
		return err
	}
	if len(shares) == 0 {
		key, value, asked := cs.askedBy(pod.GetAnnotations(), ctr.GetName())
		if !asked {
			r.Count = 0 // which the core request has implied
			return nil
		}
		return annotationError(key, value, errors.New("this node gives GPUs by resource claims: ask with resources.limits nvshare.com/gpu, or with a ResourceClaimTemplate"))
	}
	if len(r.Devices) > 0 {
		key, value, _ := cs.askedBy(pod.GetAnnotations(), ctr.GetName())
		return annotationError(key, value, fmt.Errorf("the container has its GPUs by claim %s: remove the annotation", shares[0].Claim))
	}
	r.Count, r.Shares = 0, shares
	for i, s := range shares {
		if s.Terms != shares[0].Terms {
			return fmt.Errorf("claims %s and %s give it different parts of two GPUs (%s; %s): request the same of each", shares[0].Claim, s.Claim, describeTerms(shares[0].Terms), describeTerms(s.Terms))
		}
		if slices.ContainsFunc(shares[:i], func(o ClaimPart) bool { return o.GPU == s.GPU }) {
			return fmt.Errorf("claims give it two parts of GPU %s, which programs see once: request one larger part, or two GPUs with the constraint distinctAttribute: nvshare.com/uuid", s.GPU)
		}
	}
	r.Terms, _ = lowered(r.Terms, shares[0])
	return r.Terms.Consistent() // annotation and claim may contradict each other
}

// missedClaim tells whether the kubelet gave a container a share, and no plugin has seen the
// container. CDI alone has its programs load the shim, but without what only the plugin
// gives: the claim's terms from the first call on, and the claim's overlap group.
func (p *Plugin) missedClaim(pod *api.PodSandbox, ctr *api.Container) bool {
	if p.containers.Claims == nil || !p.hasShim(ctr) || adjusted(pod, ctr) {
		return false
	}
	shares, err := p.containers.sharesOf(pod, ctr, true)
	return len(shares) > 0 || err != nil
}

// boundByClaims keeps the terms of a container within its claims; old is what it had. The error names the
// fields that ask for more. A container of whose claims nothing is known keeps its terms: the claim
// was given back, so that the container ends, or its record is lost. The lock is held.
func (cs *Containers) boundByClaims(c *Container, old Container) error {
	var errs []error
	for _, name := range c.Claims {
		s, ok := ClaimPart{}, false
		if cs.Claims != nil {
			s, ok = cs.Claims.ByDevice(name)
		}
		if !ok {
			c.Terms, c.Keep = old.Terms, old.Keep
			continue
		}
		errs = append(errs, boundSaying(&c.Terms, s, "claim "+s.Claim))
		break // all shares of a container have the same terms
	}
	return errors.Join(errs...)
}

// boundSaying is lowered for one who is told of the fields that ask for more.
func boundSaying(t *sched.Terms, s ClaimPart, whose string) error {
	var errs []error
	asked := *t
	var more sched.FieldSet
	*t, more = lowered(asked, s)
	for _, f := range sched.Fields {
		if more&f.ID != 0 {
			errs = append(errs, fmt.Errorf("%s %s is more than, or other than, what %s has: %s holds", f.Name, f.Format(asked), whose, f.Format(*t)))
		}
	}
	return errors.Join(errs...)
}

// lowered returns what annotations may say where a claim gives a share: less of what it
// says, and all that it leaves open, unless it is to look only. more has the fields that ask for more; these stay
// as the claim has them.
func lowered(asked sched.Terms, s ClaimPart) (t sched.Terms, more sched.FieldSet) {
	claim := s.Terms
	t = asked.Or(claim)
	for _, f := range sched.Fields {
		if (f.Said(claim) || s.Admin && f.Said(t)) && exceeds(f, t, claim) {
			t.Copy(claim, f.ID)
			more |= f.ID
		}
	}
	if t.CoreLimit != 0 && t.CoreRequest > t.CoreLimit {
		t.CoreRequest = t.CoreLimit
	}
	return t, more
}

// exceeds tells whether a field of t asks for more than a claim says, or for something
// else.
func exceeds(f sched.Field, t, claim sched.Terms) bool {
	switch f.ID {
	case sched.MemoryLimitField:
		return t.MemoryLimit > claim.MemoryLimit
	case sched.CoreLimitField:
		return t.CoreLimit > claim.CoreLimit
	case sched.CoreRequestField:
		return t.CoreRequest > claim.CoreRequest
	case sched.WeightField:
		return t.Weight > claim.Weight
	case sched.PriorityField:
		return t.Priority > claim.Priority
	}
	return f.Format(t) != f.Format(claim)
}

// shared divides the terms of containers that use the same claims at the same time: the
// claim was charged once.
func shared(all map[string]Container) {
	users := map[string]uint32{} // by the name of the share
	for _, c := range all {
		for _, name := range c.Claims {
			users[name]++
		}
	}
	for id, c := range all {
		n := uint32(1)
		for _, name := range c.Claims {
			n = max(n, users[name])
		}
		if n == 1 {
			continue
		}
		t := &c.Terms
		t.CoreRequest /= n
		if t.CoreLimit != 0 {
			t.CoreLimit = max(t.CoreLimit/n, 1)
		}
		if t.MemoryLimit != 0 {
			t.MemoryLimit = max(t.MemoryLimit/uint64(n), sched.MinMemory)
		}
		all[id] = c
	}
}
