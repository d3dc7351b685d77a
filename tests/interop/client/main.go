// Command client is a client of kvtier's block protocol that was written from docs/ alone. It shows that the documents
// suffice, and tests/interop holds it against a pool and kvtier's own client.
//
// It reads one JSON object per line, an operation, and answers each with a line; bytes are base64. "open" connects, the
// next operations use that connection. An error is {"error": RESULT, "message": TEXT}, with RESULT as the pool's answer
// has it, or "connection" for all else.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// operation has the fields of all operations; each uses its own.
type operation struct {
	Op        string   `json:"op"`
	Target    target   `json:"target"`
	Groups    []group  `json:"groups"`
	Namespace []byte   `json:"namespace"`
	Hashes    [][]byte `json:"hashes"`
	Payloads  [][]byte `json:"payloads"`
	Bytes     []byte   `json:"bytes"`
	Keys      keyInput `json:"keys"`
}

// keyInput is what the keys of a tenant's blocks are computed from.
type keyInput struct {
	Tenant         string          `json:"tenant"`
	Namespace      namespace       `json:"namespace"`
	Secret         []byte          `json:"secret"`
	Salt           string          `json:"salt"`
	TokensPerBlock uint32          `json:"tokens_per_block"`
	Tokens         []uint32        `json:"tokens"`
	Extras         map[int][]extra `json:"extras"`
	Digest         []byte          `json:"digest"`
}

func main() {
	lines := bufio.NewReader(os.Stdin)
	answers := json.NewEncoder(os.Stdout)
	var c *client
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			return
		}
		var op operation
		var answer any
		if err == nil {
			err = json.Unmarshal(line, &op)
		}
		if err == nil {
			answer, err = perform(&c, op)
		}
		if err != nil {
			answer = described(err)
		}
		if err := answers.Encode(answer); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

func described(err error) any {
	refused := &poolError{}
	if errors.As(err, &refused) {
		return map[string]string{"error": refused.result, "message": refused.message}
	}
	return map[string]string{"error": "connection", "message": err.Error()}
}

func perform(c **client, op operation) (any, error) {
	switch op.Op {
	case "keys":
		return op.Keys.derive(), nil
	case "header":
		return blockHeader(op.Bytes, op.Payloads[0]), nil
	case "exchange":
		return exchange(op.Target, op.Bytes)
	case "open":
		if *c != nil {
			(*c).conn.Close()
			*c = nil
		}
		opened, err := open(op.Target)
		if err != nil {
			return nil, err
		}
		*c = opened
		return opened.tenant, nil
	}
	if *c == nil {
		return nil, errors.New("no connection is open")
	}
	return (*c).perform(op)
}

func (c *client) perform(op operation) (any, error) {
	switch op.Op {
	case "lookup":
		return c.lookup(op.Groups)
	case "read":
		return c.read(op.Groups)
	case "write":
		return c.write(op.Namespace, op.Hashes, op.Payloads)
	case "discard":
		return c.discard(op.Groups)
	case "usage":
		return c.usage()
	}
	return nil, fmt.Errorf("no operation is called %q", op.Op)
}

// exchange sends bytes as they are, says that no more will come, and returns the headers of all frames that came back.
// How the connection ended is the error, unless it ended between frames.
func exchange(to target, raw []byte) ([]map[string]any, error) {
	conn, err := connect(to)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	if _, err := conn.Write(raw); err != nil {
		return nil, err
	}
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		if err := half.CloseWrite(); err != nil {
			return nil, err
		}
	}
	for headers := []map[string]any{}; ; {
		answer, err := readFrame(conn)
		if err == io.EOF {
			return headers, nil
		}
		if err != nil {
			return nil, err
		}
		headers = append(headers, answer.fields)
	}
}

func (k keyInput) derive() map[string]any {
	root := chainRoot(k.Secret, k.Salt, k.TokensPerBlock)
	hashes := chainHashes(root, k.Tokens, int(k.TokensPerBlock), k.Extras)
	keys := [][]byte{}
	for _, hash := range hashes {
		keys = append(keys, storeKey(tenantID(k.Tenant), k.Namespace.id(), hash))
	}
	return map[string]any{"root": root, "store_keys": keys, "external_key": externalKey(root, k.Digest)}
}
