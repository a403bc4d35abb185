"""Guess a number between two bounds; the answer is higher or lower. Ten guesses."""
import json, random
from sandbox.contract import Task, Score
def tool(n,d,**p):
    return {"type":"function","function":{"name":n,"description":d,"parameters":{"type":"object","properties":p,"required":list(p)}}}
def call(n,**a):
    return {"role":"assistant","content":None,"tool_calls":[{"id":"c1","type":"function","function":{"name":n,"arguments":json.dumps(a)}}]}
class Base:
    limit = 30
    def step(self,m):
        self.turn+=1; calls=m.get("tool_calls") or []
        if not calls: self.ended=True
        return [{"role":"tool","tool_call_id":c["id"],"content":json.dumps(self._safe(c["function"]))} for c in calls]
    def _safe(self,f):
        try:
            return self._do(f["name"],json.loads(f["arguments"]))
        except (KeyError,TypeError,ValueError,IndexError,AttributeError): return {"error":"no such tool, or arguments that do not fit"}
    @property
    def done(self): return self.ended or self.turn>=self.limit
    def score(self):
        return Score(1.0 if self.won else 0.0,self.won,{})

TOOLS=[tool("guess","Guess; the answer is higher, lower or right.",number={"type":"integer"})]
class Environment(Base):
    def reset(self,seed):
        rng=random.Random(seed); self.turn=0; self.ended=self.won=False; self.tries=0
        self.low=rng.randrange(0,5000); self.high=self.low+rng.randrange(300,1000); self.n=rng.randrange(self.low,self.high+1)
        t=rng.choice(["I think of a number from {} to {}. You have ten guesses.","Find my number! It lies between {} and {}. Ten tries.","Guess a number, at least {}, at most {}. Ten attempts are yours.","From {} to {}: which number is mine? Ask ten times at most.","Ready? {} to {}, ten guesses.","A game: my number is no less than {}, no more than {}. Ten guesses, go."])
        return Task("You play a guessing game.",[{"role":"user","content":t.format(self.low,self.high)}],TOOLS)
    def _do(self,name,a):
        if name!="guess" or type(a["number"]) is not int or set(a)!={"number"}: raise ValueError
        self.tries+=1
        if a["number"]==self.n: self.won=self.ended=True; return {"answer":"right"}
        if self.tries>=10: self.ended=True
        return {"answer":"higher" if a["number"]<self.n else "lower"}
    def oracle(self):
        lo,hi=self.low,self.high
        while True:
            g=(lo+hi)//2
            yield call("guess",number=g)
            if g==self.n: return
            if g<self.n: lo=g+1
            else: hi=g-1
