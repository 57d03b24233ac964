// SPDX-License-Identifier: Apache-2.0

package sched

// list is a doubly linked list through the clients themselves, so that a
// client leaves the middle of it in constant time and without a search.
type list struct {
	head, tail *client
	n          int
}

// push appends a client that is in no list.
func (l *list) push(cl *client) { l.insertAfter(l.tail, cl) }

// insert puts a client that is in no list behind those with an earlier base.
// Bases are the time of insertion, except for a restored client's, so this
// passes at most that one.
func (l *list) insert(cl *client) {
	at := l.tail
	for at != nil && at.base > cl.base {
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
