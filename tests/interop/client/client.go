package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

// timeout bounds one request with its answers; the pool's own limit is as long.
const timeout = 60 * time.Second

// poolError is an answer other than ok. The connection is over after it.
type poolError struct{ result, message string }

func (e *poolError) Error() string { return e.result + ": " + e.message }

// target says where a pool is and who asks. CA turns TLS on; a certificate with its key is for mutual TLS.
type target struct {
	Address     string   `json:"address"`
	CA          string   `json:"ca"`
	Certificate string   `json:"certificate"`
	Key         string   `json:"key"`
	Token       string   `json:"token"`
	Namespaces  [][]byte `json:"namespaces"`
}

// client is one connection to a pool, for one goroutine. Any error ends it; a status is none.
type client struct {
	conn   net.Conn
	tenant []byte
	lastID uint64
}

// connect opens a connection; the first frame on it is to be HELLO.
func connect(to target) (net.Conn, error) {
	dialer := &net.Dialer{Timeout: 5 * time.Second}
	if strings.HasPrefix(to.Address, "unix:") {
		return dialer.Dial("unix", strings.TrimPrefix(to.Address, "unix:"))
	}
	if to.CA == "" {
		return dialer.Dial("tcp", to.Address)
	}
	pem, err := os.ReadFile(to.CA)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("no certificate in %s", to.CA)
	}
	if to.Certificate != "" {
		own, err := tls.LoadX509KeyPair(to.Certificate, to.Key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{own}
	}
	return tls.DialWithDialer(dialer, "tcp", to.Address, config)
}

// open connects and logs in.
func open(to target) (*client, error) {
	conn, err := connect(to)
	if err != nil {
		return nil, err
	}
	c := &client{conn: conn}
	request := []field{{"versions", []any{uint64(1)}}, {"client", "interop"}}
	if to.Token != "" {
		request = append(request, field{"token", to.Token})
	}
	if len(to.Namespaces) > 0 {
		request = append(request, field{"namespaces", bins(to.Namespaces)})
	}
	answer, err := c.call("hello", request, nil)
	if err == nil {
		c.tenant, err = bin(answer, "tenant")
	}
	if err == nil && (len(c.tenant) != tenantBytes || answer.fields["version"] != uint64(1)) {
		err = errors.New("hello: the pool chose no version that this client speaks")
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return c, nil
}

// call sends a request and receives the first frame of its answer.
func (c *client) call(verb string, fields []field, payloads [][]byte) (frame, error) {
	c.lastID++
	head := []field{{"id", c.lastID}, {"verb", verb}}
	length := 0
	for _, payload := range payloads {
		length += len(payload)
	}
	if err := c.conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return frame{}, err
	}
	buffers := net.Buffers(append([][]byte{packFrame(pack(nil, append(head, fields...)), length)}, payloads...))
	_, sendError := buffers.WriteTo(c.conn)
	answer, err := c.receive()
	if sendError != nil && err != nil && !errors.As(err, new(*poolError)) {
		return frame{}, sendError // there was no reason to be received
	}
	return answer, err
}

// receive is the next frame of the answer to the last request.
func (c *client) receive() (frame, error) {
	answer, err := readFrame(c.conn)
	if err != nil {
		return frame{}, err
	}
	result, known := answer.fields["result"].(string)
	if !known || result != "ok" {
		message, _ := answer.fields["message"].(string)
		return frame{}, &poolError{result, message}
	}
	if answer.fields["id"] != c.lastID {
		return frame{}, fmt.Errorf("an answer to request %v, not to %d", answer.fields["id"], c.lastID)
	}
	return answer, nil
}

func bins(items [][]byte) []any {
	list := []any{}
	for _, item := range items {
		list = append(list, item)
	}
	return list
}

func bin(answer frame, name string) ([]byte, error) {
	value, ok := answer.fields[name].([]byte)
	if !ok {
		return nil, fmt.Errorf("the answer has no bytes in %s", name)
	}
	return value, nil
}

func number(fields map[string]any, name string) (uint64, error) {
	value, ok := fields[name].(uint64)
	if !ok {
		return 0, fmt.Errorf("the answer has no number in %s", name)
	}
	return value, nil
}
