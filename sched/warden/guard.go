// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/warden/order"
	"github.com/nvshare/nvshare/sched/warden/rm"
)

// The guard is a second process of the same program, in a session of its own. It reads a
// pipe of which the warden has the other end: the pipe's end says that the warden has
// ended, and silence that it hangs. Then the guard puts on what the ledger names.

// What the warden writes into the pipe.
const (
	beatBusy = 'b' // the ledger names somebody: more follows within order.Lease
	beatIdle = 'i'
)

const guardReady = "ready\n"

// guardStart is how long a guard may take to start, on a machine that does much else.
const guardStart = 30 * time.Second

// guard is the warden's side.
type guard struct {
	command []string
	lock    *os.File
	log     *logrus.Entry
	ended   func()

	mu   sync.Mutex
	pipe *os.File // nil: none runs
	over bool
	busy bool // what was said last
	gone sync.WaitGroup
}

// startGuard starts a guard, and another one whenever it ends.
func startGuard(command []string, lock *os.File, log *logrus.Entry, ended func()) (*guard, error) {
	g := &guard{command: command, lock: lock, log: log, ended: ended}
	return g, g.start()
}

func (g *guard) start() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.Command(g.command[0], g.command[1:]...)
	cmd.Stdin, cmd.Stderr = r, os.Stderr
	cmd.ExtraFiles = []*os.File{g.lock} // held until the guard has done its work
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		w.Close()
		return fmt.Errorf("start the guard: %w", err)
	}
	late := time.AfterFunc(guardStart, func() { _ = cmd.Process.Kill() }) // ends what it says, too
	line, err := bufio.NewReader(out).ReadString('\n')
	late.Stop()
	if err != nil || line != guardReady {
		w.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return fmt.Errorf("the guard did not start: %q, %w", line, err)
	}
	g.mu.Lock()
	if g.over { // since this one was started: it ends with its pipe
		w.Close()
	} else {
		g.pipe, g.busy = w, false
	}
	g.mu.Unlock()
	g.gone.Go(func() { g.await(cmd) })
	return nil
}

// await waits for the end of the guard, after which another one is started.
func (g *guard) await(cmd *exec.Cmd) {
	err := cmd.Wait()
	g.mu.Lock()
	if g.pipe != nil {
		g.pipe.Close()
		g.pipe = nil
	}
	over := g.over
	g.mu.Unlock()
	if over {
		return
	}
	g.log.WithError(err).Warn("the guard has ended: all channels go on, and another one starts")
	g.ended()
	for {
		if err := g.start(); err == nil {
			return
		}
		g.log.WithError(err).Error("nobody is taken off the GPU until there is a guard")
		time.Sleep(time.Second)
		g.mu.Lock()
		over := g.over
		g.mu.Unlock()
		if over {
			return
		}
	}
}

// watches tells the guard that somebody will be off. false: there is none.
func (g *guard) watches() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.pipe != nil && (g.busy || g.say(true))
}

// beat says that the warden goes on.
func (g *guard) beat(busy bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pipe != nil && (busy || g.busy) {
		g.say(busy)
	}
}

func (g *guard) say(busy bool) bool {
	what := byte(beatIdle)
	if busy {
		what = beatBusy
	}
	raw, err := g.pipe.SyscallConn()
	if err == nil {
		// One try, which fails where the pipe is full: the guard hangs. A time limit would say that of a busy machine, too.
		closed := raw.Write(func(fd uintptr) bool {
			_, err = unix.Write(int(fd), []byte{what})
			return true
		})
		err = errors.Join(err, closed)
	}
	g.busy = busy && err == nil
	return err == nil
}

func (g *guard) end() {
	g.mu.Lock()
	g.over = true
	if g.pipe != nil {
		g.pipe.Close()
		g.pipe = nil
	}
	g.mu.Unlock()
	g.gone.Wait()
}

// RunGuard is the guard. It ends when the warden has, and all is on. What it cannot put on stays in the ledger.
func RunGuard(dir string, d rm.Driver, log *logrus.Entry) error {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT) // they are for the warden, whose end is enough
	l, err := newLedger(dir)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(os.Stdout, guardReady); err != nil {
		return err
	}
	return watch(os.Stdin, l, d, log)
}

func watch(pipe *os.File, l *ledger, d rm.Driver, log *logrus.Entry) error {
	words := make(chan byte)
	go func() {
		defer close(words)
		buf := make([]byte, 1)
		for {
			if n, err := pipe.Read(buf); n == 0 || err != nil {
				return
			}
			words <- buf[0]
		}
	}()
	var silence <-chan time.Time
	for {
		select {
		case word, ok := <-words:
			if !ok {
				n, left, err := free(d, l)
				if n > 0 {
					log.Warnf("the warden has ended: the channels of %d processes go on", n)
				}
				return errors.Join(err, l.keep(left))
			}
			if silence = nil; word == beatBusy {
				silence = time.After(order.Lease)
			}
		case <-silence:
			n, _, err := free(d, l)
			log.WithError(err).Warnf("the warden hangs: the channels of %d processes go on", n)
			silence = time.After(order.Lease)
		}
	}
}
