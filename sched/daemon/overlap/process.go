// SPDX-License-Identifier: Apache-2.0

package overlap

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// recordName is of the file below a group's directory that says which process its daemon is;
// serverName says it of the server.
const (
	recordName = "daemon.json"
	serverName = "server.json"
)

// controlSocket is what the daemon makes in its pipe directory when it can be asked.
const controlSocket = "control"

func (k *keeper) path(name string) string { return filepath.Join(k.group().Dir, name) }

func readProcess(path string) (p peer.Process, ok bool) {
	data, err := os.ReadFile(path)
	return p, err == nil && json.Unmarshal(data, &p) == nil && p.PID > 0
}

func writeProcess(path string, p peer.Process) error {
	data, err := json.Marshal(p)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// takeOver returns the daemon of an earlier scheduler, if it lives.
func (k *keeper) takeOver() *peer.Peer {
	recorded, ok := readProcess(k.path(recordName))
	if !ok {
		return nil
	}
	p, err := k.m.peers.Find(recorded)
	if err != nil {
		return nil
	}
	if err := k.giveBack(int(p.UID)); err != nil {
		k.m.o.Log.WithError(err).Warn("give the directories of an overlap group back to its members' user")
	}
	return p
}

// giveBack gives the group's directories to the members' user again. systemd gives all that is below
// the run directory to the scheduler's user (RuntimeDirectory=) where the owner of that directory is
// another one, as after systemd-tmpfiles, which rpm runs.
func (k *keeper) giveBack(uid int) (err error) {
	if uid == os.Geteuid() {
		return nil
	}
	for _, name := range []string{api.OverlapPipe, api.OverlapShared, api.OverlapLog} {
		// What is in them is the members', who may change it meanwhile: nothing outside of the directory
		// is reached, and no file that has another name elsewhere.
		root, failed := os.OpenRoot(k.path(name))
		if failed != nil {
			err = errors.Join(err, failed)
			continue
		}
		err = errors.Join(err, fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			if st := info.Sys().(*syscall.Stat_t); int(st.Uid) == uid || !d.IsDir() && st.Nlink > 1 {
				return nil
			}
			return root.Lchown(path, uid, -1)
		}), root.Close())
	}
	return err
}

func (k *keeper) noteServer(server peer.Process) {
	if err := writeProcess(k.path(serverName), server); err != nil {
		k.m.o.Log.WithError(err).Warn("record the server of an overlap group")
	}
}

// start makes the directories and the daemon. It returns when the daemon answers.
func (k *keeper) start() (*peer.Peer, error) {
	control, err := k.m.o.Control()
	if err != nil {
		return nil, err
	}
	if err := k.makeDirs(); err != nil {
		return nil, err
	}
	k.endServer() // of a daemon that was killed: two servers would share the GPU by time slices
	cmd := exec.Command(k.m.o.Starter[0], append(k.m.o.Starter[1:], k.group().Dir, strconv.FormatUint(uint64(k.group().UID), 10), strconv.FormatBool(k.group().Own), control, "-f")...)
	cmd.Env = k.environment()
	cmd.Dir = "/"
	// A session of its own: what ends the scheduler's does not end the members'.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if k.group().Own {
		cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWNS
	}
	log, err := os.OpenFile(k.path("start.log"), os.O_CREATE|os.O_TRUNC|os.O_WRONLY|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("%w (members in containers need a scheduler with CAP_SYS_ADMIN)", err)
		}
		return nil, fmt.Errorf("start an MPS daemon: %w", err)
	}
	ended := make(chan struct{})
	k.m.wg.Go(func() { // or the process stays as a zombie
		done := make(chan struct{})
		go func() { _ = cmd.Wait(); close(done) }()
		select {
		case <-done:
			close(ended)
		case <-k.m.closed:
		}
	})
	p, err := k.m.peers.FindPID(int32(cmd.Process.Pid))
	if err != nil {
		return nil, fmt.Errorf("the MPS daemon ended at its start: %s", k.said())
	}
	if err := k.awaitAnswer(control, ended); err != nil {
		_ = p.Kill()
		p.Close()
		return nil, err
	}
	return p, nil
}

// said returns what a daemon that did not start has written.
func (k *keeper) said() string {
	data, _ := os.ReadFile(k.path("start.log"))
	return readable(data)
}

// readable is the end of what was said, fit for the status: a member may have said it, who has the
// directory of the daemon's socket.
func readable(said []byte) string {
	said = said[max(len(said)-512, 0):]
	return strings.TrimSpace(strings.ToValidUTF8(string(said), "?"))
}

func (k *keeper) awaitAnswer(control string, ended <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	tick := time.Tick(10 * time.Millisecond)
	why := fmt.Sprintf("it makes no socket in %s", k.path(api.OverlapPipe))
	for {
		if _, err := os.Lstat(filepath.Join(k.path(api.OverlapPipe), controlSocket)); err == nil {
			out, err := k.ask(ctx, control, "get_server_list")
			if err == nil {
				return nil
			}
			why = fmt.Sprintf("%v: %s", err, out) // it may not listen yet
		}
		select {
		case <-tick:
		case <-ended:
			return fmt.Errorf("the MPS daemon ended at its start: %s", k.said())
		case <-k.m.closed:
			return errors.New("the scheduler is ending")
		case <-ctx.Done():
			return fmt.Errorf("the MPS daemon does not answer within %v: %s: %s", Patience, why, k.said())
		}
	}
}

// ask sends the daemon a command, as the members' user.
func (k *keeper) ask(ctx context.Context, control, command string) (string, error) {
	cmd := exec.CommandContext(ctx, control)
	cmd.Env = k.environment()
	cmd.Dir = "/"
	cmd.Stdin = strings.NewReader(command + "\n")
	cmd.WaitDelay = time.Second
	if int(k.group().UID) != os.Geteuid() {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: k.group().UID, Gid: nogroup}}
	}
	out, err := cmd.CombinedOutput()
	return readable(out), err
}

func (k *keeper) environment() []string {
	env := append([]string{
		api.MPSPipeEnv + "=" + k.path(api.OverlapPipe), "CUDA_MPS_LOG_DIRECTORY=" + k.path(api.OverlapLog),
		"CUDA_VISIBLE_DEVICES=" + k.group().GPU,
	}, k.m.o.Env...)
	for _, name := range []string{"PATH", "LD_LIBRARY_PATH"} { // where the driver's libraries are
		if v, set := os.LookupEnv(name); set {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// makeDirs makes the group's directories, and empties those that are there: members may have
// them mounted.
func (k *keeper) makeDirs() error {
	for dir, mode := range map[string]os.FileMode{k.m.o.Dir: 0o711, k.group().Dir: 0o711} {
		if err := os.MkdirAll(dir, mode); err != nil {
			return err
		}
		if err := os.Chmod(dir, mode); err != nil {
			return err
		}
	}
	for _, name := range []string{api.OverlapPipe, api.OverlapShared, api.OverlapLog} {
		dir := k.path(name)
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		if name != api.OverlapShared {
			empty(dir)
		}
		if err := os.Lchown(dir, int(k.group().UID), -1); err != nil && int(k.group().UID) != os.Geteuid() {
			return fmt.Errorf("%w (the scheduler runs as user %d, and overlap groups of user %d need one that runs as root: under systemd, install deployments/systemd/overlap-groups.conf into /etc/systemd/system/nvshare-scheduler.service.d, then systemctl daemon-reload and systemctl restart nvshare-scheduler.service)", err, os.Geteuid(), k.group().UID)
		}
	}
	return nil
}

func empty(dir string) {
	names, _ := os.ReadDir(dir)
	for _, n := range names {
		_ = os.RemoveAll(filepath.Join(dir, n.Name()))
	}
}

// end has the daemon and its servers end.
func (k *keeper) end(p *peer.Peer, dead <-chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	if control, err := k.m.o.Control(); err == nil && k.group().GPU != "" {
		_, _ = k.ask(ctx, control, "quit -t 1")
	} else {
		_ = p.Kill()
	}
	select {
	case <-dead:
	case <-time.After(3 * time.Second):
		_ = p.Kill()
		select {
		case <-dead:
		case <-ctx.Done(): // it cannot be killed: the record stays
		}
	}
}

// endServer kills the server that is recorded, if it lives.
func (k *keeper) endServer() {
	recorded, ok := readProcess(k.path(serverName))
	if !ok {
		return
	}
	if p, err := k.m.peers.Find(recorded); err == nil {
		_ = p.Kill()
		p.Close()
	}
	_ = os.Remove(k.path(serverName))
}

// clean removes what is left of a group whose daemon has ended.
func (k *keeper) clean() {
	k.endServer()
	for _, name := range []string{api.OverlapPipe, api.OverlapShared, api.OverlapLog} {
		empty(k.path(name))
	}
	if err := os.RemoveAll(k.group().Dir); err != nil {
		k.m.o.Log.WithError(err).Warn("remove the directory of an overlap group")
	}
}

// serverOf returns the MPS server that a daemon has, or none.
func (k *keeper) serverOf(daemon int32) peer.Process {
	children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", daemon, daemon))
	for child := range strings.FieldsSeq(string(children)) {
		pid, _ := strconv.Atoi(child)
		if p, err := k.m.peers.Look(int32(pid)); err == nil { // else it has ended
			return p.Process
		}
	}
	return peer.Process{}
}
