// FLASHMHF_LOG_PLANS=1: the planners print to stderr what they plan.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "common/problem.h"

namespace flashmhf {

inline bool logs_plans() {
    static const char *const value = std::getenv("FLASHMHF_LOG_PLANS");
    return value && std::strcmp(value, "1") == 0;
}
inline void log_plan(const char *direction, const Shape &s, const std::string &text) {
    std::fprintf(stderr, "flashmhf %s: %lld sequences of %lld tokens, H = %d, E = %d, d_e = %lld, d_h = %d\n%s", direction,
                 static_cast<long long>(s.batch), static_cast<long long>(s.length), s.heads, s.subnets,
                 static_cast<long long>(s.subnet_dim), s.head_dim, text.c_str());
}

}  // namespace flashmhf
