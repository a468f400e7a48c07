// Which cluster computes what. The same code runs in every role of the kernel, in the combine kernel, and on the host for the tests.
//
// Work items are (head, block of row tiles), blocks fastest, so that all clusters stream one head's weights from the L2 at a time. Items go
// in waves: item = wave * clusters + cluster. The last items, which do not fill a wave, are laid end to end along the inter dimension and
// cut into `splits` equal spans, one a cluster; a span covers parts of at most two items. Going on to another item takes the time of `gap`
// tiles: we lay `gap` empty tiles before each item, so that a span that crosses into it gets fewer real tiles. The parts of an item are
// summed in a fixed order of the clusters, so a result depends on the shape and the device only.
//
// README.md has the ways to divide items, and who adds parts when. Where all items run at once and a head has several blocks, clusters side
// by side take one span for all of them (`abreast`): end to end the blocks would reach a tile at times too far apart for the L2. In the ways
// that have `tail` tiles, these are a part of `gap` and also lie behind the last item.
#pragma once

#include <cstdint>

#include "common/device.h"
#include "common/geometry.h"

namespace flashmhf {

// Parts of an item that one cluster adds up at its end; of more, the combine kernel is faster. Without whole waves, and behind one: at
// T = 1,152 (H = 16, E = 22, d_e = 384, d_h = 128) twelve parts take the combine kernel, at T = 1,280 six do not.
constexpr int most_gathered = 4, most_behind_wave = 8;

// How a launch divides its items: whole ones wave by wave, and the rest into parts; all into parts, which the clusters add up; or all
// into slices. Each has an instance of the kernel.
enum class Division { waves, gathers, slices };
constexpr const char *division_names[] = {"waves", "gathers", "slices"};

struct ForwardSchedule {
    int inter_tiles;  // of a head: E * ceil(d_e / 64)
    int abreast;      // blocks of a head side by side: 1, or all, without whole waves; what follows counts those of one block
    int clusters;     // of the launch
    int waves;        // of whole items
    int rest;         // items after them, fewer than clusters
    int splits;       // clusters that share the rest; rest <= splits <= clusters
    int slices;       // CTAs of a cluster that divide the inter range of its item; more than 1: one wave, no rest
    int gap;          // tiles
    bool adds_parts;  // the clusters add up the parts of split items, with one wave or none; otherwise the combine kernel does
    int16_t tail;     // tiles
    // rest * (gap + inter_tiles) + tail = splits * quotient + remainder, or inter_tiles = slices * quotient + remainder
    int quotient, remainder;

    FLASHMHF_HOST_DEVICE bool gathers() const { return adds_parts && waves == 0; }
    FLASHMHF_HOST_DEVICE Division division() const {
        return gathers() ? Division::gathers : slices > 1 ? Division::slices : Division::waves;
    }
    // First tile of a cluster's span, in the gaps and tiles of the rest laid end to end; or of a slice's, in the tiles of an item.
    FLASHMHF_HOST_DEVICE int span_begin(int cluster) const { return cluster * quotient + (cluster < remainder ? cluster : remainder); }
    // The cluster whose span holds a tile of them.
    FLASHMHF_HOST_DEVICE int owner(int tile) const {
        const int longer = remainder * (quotient + 1);
        return tile < longer ? tile / (quotient + 1) : remainder + (tile - longer) / quotient;
    }
    // Clusters first..last hold parts of item `index` of the rest; one alone holds all of it, and stores the result itself.
    FLASHMHF_HOST_DEVICE int first_owner(int index) const { return owner(index * (gap + inter_tiles) + gap); }
    FLASHMHF_HOST_DEVICE int last_owner(int index) const { return owner((index + 1) * (gap + inter_tiles) - 1); }
    // Where a cluster keeps its part of item `index` of the rest: 0 for the first item of its span, 1 for the second.
    FLASHMHF_HOST_DEVICE int part_of(int cluster, int index) const { return span_begin(cluster) / (gap + inter_tiles) != index; }
    // The split item of the rest whose parts a cluster adds, or -1: the one whose last tile lies in its span, or, where adding takes `tail`
    // tiles behind it, the middle of these, so that the cluster is spared most of them.
    FLASHMHF_HOST_DEVICE int adds_item(int cluster) const {
        if (cluster >= splits) return -1;
        const int begin = span_begin(cluster), size = gap + inter_tiles, behind = (tail + 1) / 2;
        const int index = begin < behind ? 0 : (begin - behind) / size;
        if (index >= rest || (index + 1) * size - 1 + behind >= span_begin(cluster + 1)) return -1;
        return first_owner(index) < last_owner(index) ? index : -1;
    }
};

struct Work {
    int item, begin, end;  // inter tiles begin..end of a work item
    int part;              // as part_of(); unused for a whole item
};

// The work of one cluster, or of one of its slices, in order.
struct WorkCursor {
    const ForwardSchedule &s;
    int wave = 0, tile;

    FLASHMHF_HOST_DEVICE WorkCursor(const ForwardSchedule &schedule, int cluster) : s(schedule) {
        tile = cluster < s.splits ? s.span_begin(cluster) : 0;
    }
    // The same cluster and block (below `abreast`) every time: a caller may have no register for them. The CTA's rank in the cluster.
    FLASHMHF_HOST_DEVICE bool next(Work &work, int cluster, int block, int rank) {
        const int stop = cluster < s.splits ? s.span_begin(cluster + 1) : 0;
        if ((s.adds_parts || wave == s.waves) && tile < stop) {
            const int index = tile / (s.gap + s.inter_tiles), first = index * (s.gap + s.inter_tiles) + s.gap;
            if (first < stop) {
                work = {s.waves * s.clusters + index * s.abreast + block, tile < first ? 0 : tile - first,
                        s.inter_tiles < stop - first ? s.inter_tiles : stop - first, s.part_of(cluster, index)};
                tile = first + work.end;
                return true;
            }
        }
        if (wave == s.waves) return false;
        work = {wave++ * s.clusters + cluster, 0, s.inter_tiles, 0};
        if (s.slices > 1) work.begin = s.span_begin(rank), work.end = s.span_begin(rank + 1);
        return true;
    }
};

// The same of a launch that gathers parts: the items of its span, the last one first. The last part of the other item is then still in the
// registers of the cluster that adds to it, and the parts that it waits for were, but for those of clusters in the middle of an item, stored
// long ago.
struct GatherCursor {
    const ForwardSchedule &s;
    int stop;

    FLASHMHF_HOST_DEVICE GatherCursor(const ForwardSchedule &schedule, int cluster)
        : s(schedule),
          stop(cluster < s.splits ? s.span_begin(cluster + 1) : 0) {}
    FLASHMHF_HOST_DEVICE bool next(Work &work, int cluster, int block, int) {
        const int begin = s.span_begin(cluster), size = s.gap + s.inter_tiles;
        while (stop > begin) {
            const int end = stop, index = (end - 1) / size, first = index * size + s.gap;
            stop = index * size;
            if (end <= first) continue;  // the span ends in the gap before the item
            work = {index * s.abreast + block, begin < first ? 0 : begin - first, end - first, s.part_of(cluster, index)};
            return true;
        }
        return false;
    }
};

}  // namespace flashmhf
