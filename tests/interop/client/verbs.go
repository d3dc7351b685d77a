package main

import (
	"bytes"
	"errors"
	"fmt"
)

// group names blocks of one namespace. PayloadBytes, the length of each, is for read alone.
type group struct {
	Namespace    []byte   `json:"namespace"`
	Hashes       [][]byte `json:"hashes"`
	PayloadBytes uint64   `json:"payload_bytes"`
}

// tierUsage is what the tenant has in one tier of the pool.
type tierUsage struct {
	Name          string `json:"name"`
	NumBlocks     uint64 `json:"num_blocks"`
	UsedBytes     uint64 `json:"used_bytes"`
	CapacityBytes uint64 `json:"capacity_bytes"`
	UsedPercent   uint64 `json:"used_percent"`
}

func packGroups(groups []group, withLengths bool) field {
	list := []any{}
	for _, g := range groups {
		fields := []field{{"namespace", g.Namespace}, {"hashes", bytes.Join(g.Hashes, nil)}}
		if withLengths {
			fields = append(fields, field{"payload_bytes", g.PayloadBytes})
		}
		list = append(list, fields)
	}
	return field{"groups", list}
}

// lookup is a status per block: 0 miss, 1 hit, 2 being written.
func (c *client) lookup(groups []group) ([]byte, error) {
	answer, err := c.call("lookup", []field{packGroups(groups, false)}, nil)
	if err != nil {
		return nil, err
	}
	return bin(answer, "statuses")
}

// discard is how many of the blocks the pool had.
func (c *client) discard(groups []group) (uint64, error) {
	answer, err := c.call("discard", []field{packGroups(groups, false)}, nil)
	if err != nil {
		return 0, err
	}
	return number(answer.fields, "num_discarded")
}

// write stores payloads under the hashes of one namespace: a status per block.
func (c *client) write(namespaceID []byte, hashes, payloads [][]byte) ([]byte, error) {
	if len(hashes) != len(payloads) {
		return nil, fmt.Errorf("write: %d hashes and %d payloads", len(hashes), len(payloads))
	}
	headers := []byte{}
	for i, hash := range hashes {
		headers = append(headers, blockHeader(storeKey(c.tenant, namespaceID, hash), payloads[i])...)
	}
	answer, err := c.call("write", []field{{"headers", headers}}, payloads)
	if err != nil {
		return nil, err
	}
	return bin(answer, "statuses")
}

// read is a payload per block, every one verified; nil is a miss.
func (c *client) read(groups []group) ([][]byte, error) {
	keys, lengths := [][]byte{}, []uint64{}
	for _, g := range groups {
		for _, hash := range g.Hashes {
			keys, lengths = append(keys, storeKey(c.tenant, g.Namespace, hash)), append(lengths, g.PayloadBytes)
		}
	}
	payloads := [][]byte{}
	answer, err := c.call("read", []field{packGroups(groups, true)}, nil)
	for ; err == nil; answer, err = c.receive() {
		statuses, err := bin(answer, "statuses")
		if err != nil {
			return nil, err
		}
		if len(statuses) == 0 {
			break
		}
		first := len(payloads)
		if first+len(statuses) > len(keys) {
			return nil, errors.New("read: more blocks came than were asked for")
		}
		covered := keys[first : first+len(statuses)]
		part, err := splitAnswer(answer, statuses, covered, lengths[first:])
		if err != nil {
			return nil, err
		}
		payloads = append(payloads, part...)
	}
	if err == nil && len(payloads) != len(keys) {
		err = fmt.Errorf("read: %d blocks were answered for, of %d", len(payloads), len(keys))
	}
	return payloads, err
}

// splitAnswer cuts one answer to read into payloads. A block that does not match its key is a miss; lengths that do not
// fit together are an error, since nothing behind them can be believed.
func splitAnswer(answer frame, statuses []byte, keys [][]byte, lengths []uint64) ([][]byte, error) {
	headers, err := bin(answer, "headers")
	if err != nil {
		return nil, err
	}
	rest := answer.payload
	payloads := make([][]byte, len(statuses))
	for i, status := range statuses {
		if status == 0 {
			continue
		}
		if len(headers) < headerBytes || uint64(len(rest)) < lengths[i] {
			return nil, errors.New("read: an answer has less than its statuses say")
		}
		if payload := rest[:lengths[i]]; verify(keys[i], headers[:headerBytes], payload) {
			payloads[i] = payload
		}
		headers, rest = headers[headerBytes:], rest[lengths[i]:]
	}
	if len(headers)+len(rest) > 0 {
		return nil, errors.New("read: an answer has more than its statuses say")
	}
	return payloads, nil
}

func (c *client) usage() ([]tierUsage, error) {
	answer, err := c.call("usage", nil, nil)
	if err != nil {
		return nil, err
	}
	tiers, ok := answer.fields["tiers"].([]any)
	if !ok {
		return nil, errors.New("usage: the answer has no tiers")
	}
	all := []tierUsage{}
	for _, tier := range tiers {
		fields, _ := tier.(map[string]any)
		name, _ := fields["name"].(string)
		usage := tierUsage{Name: name}
		numbers := map[string]*uint64{
			"num_blocks": &usage.NumBlocks, "used_bytes": &usage.UsedBytes,
			"capacity_bytes": &usage.CapacityBytes, "used_percent": &usage.UsedPercent,
		}
		for key, into := range numbers {
			if *into, err = number(fields, key); err != nil {
				return nil, err
			}
		}
		all = append(all, usage)
	}
	return all, nil
}
