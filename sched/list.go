// SPDX-License-Identifier: Apache-2.0

package sched

// list is a doubly linked list through the clients themselves: a client leaves the
// middle of it in constant time, without a search.
type list struct {
	head, tail *client
	n          int
}

// push appends a client that is in no list.
func (l *list) push(cl *client) { l.insertAfter(l.tail, cl) }

// insert puts a client with a grant, which is in no list, behind those whose grace
// period began earlier. It begins at the insertion, except for restored grants and
// those of StepOne, so this passes no others.
func (l *list) insert(cl *client) {
	at := l.tail
	for at != nil && at.grant.graceFrom > cl.grant.graceFrom {
		at = at.prev
	}
	l.insertAfter(at, cl)
}

func (l *list) insertAfter(at, cl *client) {
	if cl.in != nil {
		panic("sched: client is in a list already")
	}
	cl.in = l
	l.n++
	cl.prev = at
	if at != nil {
		cl.next, at.next = at.next, cl
	} else {
		cl.next, l.head = l.head, cl
	}
	if cl.next != nil {
		cl.next.prev = cl
	} else {
		l.tail = cl
	}
}

// remove takes out a client that is in this list.
func (l *list) remove(cl *client) {
	if cl.in != l {
		panic("sched: client is not in the list")
	}
	if cl.prev != nil {
		cl.prev.next = cl.next
	} else {
		l.head = cl.next
	}
	if cl.next != nil {
		cl.next.prev = cl.prev
	} else {
		l.tail = cl.prev
	}
	cl.prev, cl.next, cl.in = nil, nil, nil
	l.n--
}
